// Chapter 4: a state that is replaced by its softmax average of stored patterns, again and again.
(given => {
  const patterns = [[1, 0], [0.31, 0.95], [-0.81, 0.59], [-0.81, -0.59], [0.31, -0.95]];
  const across = t => 300 + 110 * t, down = y => 145 - 110 * y;
  const inverse = b => 10 ** b;
  return {
    data: {patterns},
    compute: v => {
      const states = [[v.x, v.y]], beta = inverse(v.beta);
      for (let i = 0; i < v.steps; i++)
        states.push(matrix([softmax(patterns.map(p => beta * dot(p, states[i])))], patterns)[0]);
      return {states, beta, weights: softmax(patterns.map(p => beta * dot(p, states[0])))};
    },
    at: (x, y) => ({x: Math.max(-1.2, Math.min(1.2, (x - 300) / 110)), y: Math.max(-1.2, Math.min(1.2, (145 - y) / 110))}),
    draw: ({states, weights}) => {
      const P = p => [across(p[0]), down(p[1])];
      return patterns.map((p, j) => line(...P(states[0]), ...P(p), given.first, 8 * weights[j], 'opacity=".5"')).join("")
        + patterns.map(p => circle(...P(p), 7, given.first)).join("")
        + path(states.map(P), given.second) + states.slice(1).map(p => circle(...P(p), 4, given.second)).join("")
        + circle(...P(states[0]), 10, "currentColor", 'data-drag="x y" style="cursor:move;touch-action:none"');
    },
    tell: ({states, beta}) => {
      const end = states.at(-1), near = Math.min(...patterns.map(p => Math.hypot(p[0] - end[0], p[1] - end[1])));
      return `β = ${round(beta, 2)}: after ${states.length - 1} steps the state is ${round(near, 2)} from the nearest pattern `
        + `and ${round(Math.hypot(...end), 2)} from the mean of all.`;
    },
    label: {beta: b => round(inverse(b), 2), steps: t => t},
  };
})
