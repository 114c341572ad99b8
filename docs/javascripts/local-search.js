/* Search for a site that is opened from a folder. Browsers refuse a Worker there, so the script runs in a hidden frame.
   The theme uses this class by the name IFrameWorker. */
(() => {
  if (location.protocol !== "file:") return
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.loaded = new Promise(done => frame.addEventListener("load", done, { once: true }))
      const page = this.inside.document
      page.open()
      this.inside.postMessage = data => this.answer(data)
      page.write(`<script src="${new URL(url, location.href)}"><\/script>`)
      page.close()
    }
    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
})()
