// A run's evaluations: the loss of each task on its own data, and its metrics, by step.

// [{name, colour, values}] over all steps at which anything was evaluated; undefined where that task was not.
function evaluationLines(points, steps, colourOf, valueOf) {
  const tasks = [...new Set(points.map((point) => point.task))];
  return tasks.map((task) => {
    const found = new Map(points.filter((point) => point.task === task).map((point) => [point.step, valueOf(point)]));
    return { name: task, colour: colourOf(task), values: steps.map((step) => found.get(step)) };
  }).filter((line) => line.values.some((value) => value !== undefined));
}

function evaluationsPart(run, colourOf) {
  const points = run.evaluations;
  if (!points.length) return null;
  const stepsOf = (found) => [...new Set(found.map((point) => point.step))];
  const steps = stepsOf(points);
  const names = [...new Set(points.flatMap((point) => Object.keys(point.metrics)))];
  const losses = evaluationLines(points, steps, colourOf, (point) => point.loss);
  const charts = names.slice(0, 12).map((name) => {
    const having = points.filter((point) => name in point.metrics);
    const lines = evaluationLines(having, stepsOf(having), colourOf, (point) => point.metrics[name]);
    return el('figure', { class: 'card' }, el('figcaption', {}, el('strong', {}, name)),
      lineChart(`${name} by step`, stepsOf(having), lines, digitsSigned));
  });
  const newest = new Map(points.map((point) => [point.task, point]));
  const rows = [...newest.values()].map((point) => [
    point.task, point.step, point.num_samples, valueText(point.loss),
    Object.entries(point.metrics).map(([name, value]) => `${name} ${valueText(value)}`).join(', '), seconds(point.seconds)]);
  return el('div', { id: 'evaluations' }, el('h3', {}, 'Evaluations'),
    partsLegend(losses.map((line) => [line.name, line.colour])), lineChart('Losses of evaluations by step', steps, losses, digitsSigned),
    charts.length ? el('div', { class: 'cards' }, charts) : null,
    table('The newest evaluation of each task', [['Task'], ['After step', true], ['Samples', true], ['Loss', true], ['Metrics'], ['Took', true]], rows));
}

function valueText(value) {
  return value === null ? 'not finite' : digitsSigned(value);
}
