/* Filters of the tables of results: by model, task and size, for all tables of the page. */
document.addEventListener("DOMContentLoaded", () => {
  const tables = document.querySelectorAll("table.results")
  if (!tables.length) return
  const rows = [...document.querySelectorAll("table.results tbody tr")]
  const bar = document.createElement("p")
  bar.className = "results-filters"
  const chosen = {}
  const show = () => {
    for (const row of rows) row.hidden = Object.keys(chosen).some(name => chosen[name] && row.dataset[name] !== chosen[name])
  }
  for (const name of ["model", "task", "size"]) {
    const select = document.createElement("select")
    const values = [...new Set(rows.map(row => row.dataset[name]))].sort((a, b) => a - b || a.localeCompare(b))
    for (const value of ["", ...values]) select.add(new Option(value || `every ${name}`, value))
    select.setAttribute("aria-label", name)
    select.onchange = () => { chosen[name] = select.value; show() }
    bar.append(select, " ")
  }
  tables[0].closest("div").before(bar)
})
