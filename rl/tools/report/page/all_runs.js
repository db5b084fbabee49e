"use strict";
// Sorts the table by a heading, and shows the rows that contain every word of the filter.
const body = document.querySelector("tbody"), rows = [...body.rows];
const filter = document.querySelector("input"), count = document.querySelector(".count");
function show() {
  const words = filter.value.toLowerCase().split(/\s+/);
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} runs`;
}
for (const button of document.querySelectorAll("thead button")) button.onclick = () => {
  const head = button.parentNode, rising = head.getAttribute("aria-sort") === "descending";
  for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const value = row => row.cells[head.cellIndex].dataset.v;
  rows.sort((a, b) => (value(a) === "") - (value(b) === "")
    || (rising ? 1 : -1) * value(a).localeCompare(value(b), undefined, {numeric: true}));
  // `numeric` compares digits, which is wrong behind a decimal point.
  if (rows.every(row => !isNaN(value(row)))) rows.sort((a, b) => (value(a) === "") - (value(b) === "")
    || (rising ? 1 : -1) * (value(a) - value(b)));
  body.append(...rows);
};
filter.form.onsubmit = () => false;
filter.oninput = show;
show();
