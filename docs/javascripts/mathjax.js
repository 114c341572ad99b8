/* MathJax reads the equations of docstrings as AsciiMath, between the marks that pymdownx.arithmatex sets. */
window.MathJax = {
  loader: { load: ["input/asciimath", "output/chtml"] },
  asciimath: { delimiters: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
}
