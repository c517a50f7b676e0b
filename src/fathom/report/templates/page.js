// Click a heading: sort the table by that column; click again: the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead button").forEach((button, column) => {
    button.addEventListener("click", () => {
      const heading = button.parentElement;
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value;
      const compare = (a, b) =>
        heading.dataset.kind === "text" ? key(a).localeCompare(key(b)) : Number(key(a)) - Number(key(b));
      [...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a))).forEach((row) => body.append(row));
    });
  });
}
