// Draws the overlaid curves of a comparison, when their heading is opened.
for (const folded of document.querySelectorAll("details.overlaid")) {
  const {curves, data} = page.facts;
  const draw = () => folded.open && folded.querySelector(".curves").replaceChildren(
    ...curves[folded.querySelector("summary").textContent].map((curve) => page.chart(curve, data, {})));
  folded.ontoggle = draw;
  draw();
}
