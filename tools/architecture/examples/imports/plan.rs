//! The plan of a drawing: rows of files and of the bends of long arrows, in an order with few crossings, and their
//! positions.

use std::collections::{BTreeMap, BTreeSet};

use crate::floors::{Floors, Kind};

/// The space between two neighbours in a row.
const GAP: f64 = 14.0;

/// A position in a row: a file, or a bend of arrows that pass through.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Spot {
    File(usize),
    /// All arrows of a kind to one file share their bends. Arrows back up share them by their end.
    Bend {
        kind: Kind,
        end: usize,
        row: usize,
    },
}

/// Rows of spots and the lines between neighbouring rows.
pub(crate) struct Plan {
    /// The rows from the ground up, each from left to right.
    pub(crate) rows: Vec<Vec<Spot>>,
    /// Lines from a spot down to one in the row below.
    pub(crate) lines: BTreeSet<(Kind, Spot, Spot)>,
    /// The centre of each spot.
    pub(crate) x: BTreeMap<Spot, f64>,
}

impl Plan {
    /// Plans a drawing. `width` returns the width of a file's box.
    pub(crate) fn of(floors: &Floors, width: impl Fn(usize) -> f64) -> Self {
        let lines = lines(floors);
        let mut spots: BTreeSet<Spot> = BTreeSet::new();
        for (_, upper, lower) in &lines {
            spots.extend([*upper, *lower]);
        }
        let row = |spot: &Spot| match spot {
            Spot::File(file) => floors.floor[*file],
            Spot::Bend { row, .. } => *row,
        };
        let num_rows = spots.iter().map(|spot| row(spot) + 1).max().unwrap_or(0);
        let mut rows = vec![Vec::new(); num_rows];
        for spot in spots {
            rows[row(&spot)].push(spot);
        }
        let mut plan = Self {
            rows,
            lines,
            x: BTreeMap::new(),
        };
        plan.order();
        plan.place(|spot| match spot {
            Spot::File(file) => width(file),
            Spot::Bend { .. } => 2.0,
        });
        plan
    }

    /// Sweeps up and down, sorts each row by the mean position of its neighbours, and keeps the best order.
    fn order(&mut self) {
        let mut best = (self.num_crossings(), self.rows.clone());
        for sweep in 0..60 {
            let downwards = sweep % 2 == 0;
            let num_rows = self.rows.len();
            for step in 1..num_rows {
                let (row, fixed) = if downwards {
                    (num_rows - 1 - step, num_rows - step)
                } else {
                    (step, step - 1)
                };
                let places = index(&self.rows[fixed]);
                let neighbours = self.neighbours(!downwards);
                let mean = |spot: &Spot, old: usize| {
                    let at = neighbours.get(spot).into_iter().flatten();
                    let at: Vec<f64> = at
                        .filter_map(|other| places.get(other))
                        .map(|at| *at as f64)
                        .collect();
                    if at.is_empty() {
                        old as f64
                    } else {
                        at.iter().sum::<f64>() / at.len() as f64
                    }
                };
                let mut keyed: Vec<(f64, Spot)> = self.rows[row]
                    .iter()
                    .enumerate()
                    .map(|(old, spot)| (mean(spot, old), *spot))
                    .collect();
                keyed.sort_by(|a, b| a.0.total_cmp(&b.0));
                self.rows[row] = keyed.into_iter().map(|(_, spot)| spot).collect();
            }
            let crossings = self.num_crossings();
            if crossings < best.0 {
                best = (crossings, self.rows.clone());
            }
        }
        self.rows = best.1;
    }

    /// Returns the neighbours of each spot in the row below, or above.
    fn neighbours(&self, below: bool) -> BTreeMap<Spot, Vec<Spot>> {
        let mut found: BTreeMap<Spot, Vec<Spot>> = BTreeMap::new();
        for (_, upper, lower) in &self.lines {
            let (spot, other) = if below {
                (upper, lower)
            } else {
                (lower, upper)
            };
            found.entry(*spot).or_default().push(*other);
        }
        found
    }

    fn num_crossings(&self) -> usize {
        let places: BTreeMap<Spot, usize> = self.rows.iter().flat_map(|row| index(row)).collect();
        let row_of: BTreeMap<Spot, usize> = (self.rows.iter().enumerate())
            .flat_map(|(row, spots)| spots.iter().map(move |spot| (*spot, row)))
            .collect();
        let mut by_row = vec![Vec::new(); self.rows.len()];
        for (_, upper, lower) in &self.lines {
            by_row[row_of[upper]].push((places[upper], places[lower]));
        }
        let crosses = |a: &(usize, usize), b: &(usize, usize)| {
            (a.0 < b.0) != (a.1 < b.1) && a.0 != b.0 && a.1 != b.1
        };
        by_row
            .iter()
            .map(|lines| {
                let pairs = lines.iter().enumerate().map(|(at, line)| {
                    let others = lines[at + 1..].iter();
                    others.filter(|other| crosses(line, other)).count()
                });
                pairs.sum::<usize>()
            })
            .sum()
    }

    /// Moves spots towards the centre of their neighbours, without changing their order and with space between them.
    fn place(&mut self, width: impl Fn(Spot) -> f64) {
        for row in &self.rows {
            let mut right = 0.0;
            for spot in row {
                self.x.insert(*spot, right + width(*spot) / 2.0);
                right += width(*spot) + GAP;
            }
        }
        let (below, above) = (self.neighbours(true), self.neighbours(false));
        for round in 0..120 {
            let rows: Vec<usize> = match round % 2 {
                0 => (0..self.rows.len()).collect(),
                _ => (0..self.rows.len()).rev().collect(),
            };
            for row in rows {
                let spots = &self.rows[row];
                let wanted: Vec<f64> = spots
                    .iter()
                    .map(|spot| {
                        let near = [&below, &above]
                            .into_iter()
                            .filter_map(|sides| sides.get(spot));
                        let near: Vec<f64> = near.flatten().map(|other| self.x[other]).collect();
                        if near.is_empty() {
                            self.x[spot]
                        } else {
                            near.iter().sum::<f64>() / near.len() as f64
                        }
                    })
                    .collect();
                let widths: Vec<f64> = spots.iter().map(|spot| width(*spot)).collect();
                for (spot, x) in spots.iter().zip(spread(&wanted, &widths)) {
                    self.x.insert(*spot, x);
                }
            }
        }
        let left = self
            .x
            .iter()
            .map(|(spot, x)| x - width(*spot) / 2.0)
            .fold(f64::INFINITY, f64::min);
        for x in self.x.values_mut() {
            *x -= left;
        }
    }
}

/// Returns the arrows, cut at every row that they pass.
fn lines(floors: &Floors) -> BTreeSet<(Kind, Spot, Spot)> {
    let mut lines = BTreeSet::new();
    for ((from, to), kind) in &floors.arrows {
        let (upper, lower) = match kind {
            Kind::Up => (*to, *from),
            Kind::Down | Kind::Circle => (*from, *to),
        };
        let mut spot = Spot::File(upper);
        for row in (floors.floor[lower] + 1..floors.floor[upper]).rev() {
            let bend = Spot::Bend {
                kind: *kind,
                end: *to,
                row,
            };
            lines.insert((*kind, spot, bend));
            spot = bend;
        }
        lines.insert((*kind, spot, Spot::File(lower)));
    }
    lines
}

fn index(row: &[Spot]) -> BTreeMap<Spot, usize> {
    row.iter()
        .enumerate()
        .map(|(at, spot)| (*spot, at))
        .collect()
}

/// Returns the positions nearest to the wanted ones that keep the order and the space between neighbours. Neighbours
/// that would touch move together, as one block.
fn spread(wanted: &[f64], widths: &[f64]) -> Vec<f64> {
    let mut offsets = Vec::with_capacity(wanted.len());
    let mut offset = 0.0;
    for (at, width) in widths.iter().enumerate() {
        if at > 0 {
            offset += widths[at - 1] / 2.0 + GAP + width / 2.0;
        }
        offsets.push(offset);
    }
    let mut blocks: Vec<(f64, usize)> = Vec::new();
    for (wanted, offset) in wanted.iter().zip(&offsets) {
        let mut block = (wanted - offset, 1);
        while let Some((mean, len)) = blocks.last().copied() {
            if mean <= block.0 {
                break;
            }
            blocks.pop();
            let sum = mean * len as f64 + block.0 * block.1 as f64;
            block = (sum / (len + block.1) as f64, len + block.1);
        }
        blocks.push(block);
    }
    let means = blocks
        .into_iter()
        .flat_map(|(mean, len)| std::iter::repeat_n(mean, len));
    means
        .zip(offsets)
        .map(|(mean, offset)| mean + offset)
        .collect()
}
