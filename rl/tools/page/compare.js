// Draws the overlaid curves of a comparison.
{
  const {curves, data} = page.facts;
  document.querySelector(".curves").replaceChildren(
    ...curves.map((curve) => page.chart(curve, data, {})).filter(Boolean));
}
