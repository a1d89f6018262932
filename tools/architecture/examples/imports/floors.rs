//! Arranges the files of a crate on floors. Each is above everything that it imports, except for the arrows that
//! close a circle.

use std::collections::{BTreeMap, BTreeSet};

use burn_fsdp_architecture::imports::Imports;

/// The kind of an arrow, which determines its colour.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    /// Down, to a file that does not import this one in turn.
    Down,
    /// Down, as a part of a circle.
    Circle,
    /// Back up.
    Up,
}

/// The files of a crate on floors.
pub(crate) struct Floors {
    /// The floor of each file. 0 is the ground.
    pub(crate) floor: Vec<usize>,
    /// The imports between files, with their kinds.
    pub(crate) arrows: BTreeMap<(usize, usize), Kind>,
}

impl Floors {
    pub(crate) fn of(imports: &Imports, circles: &[Vec<usize>]) -> Self {
        let mut arrows: BTreeMap<_, _> = imports
            .arrows
            .keys()
            .map(|arrow| (*arrow, Kind::Down))
            .collect();
        for circle in circles {
            let order = top_down(imports, circle);
            let place = |file: &usize| order.iter().position(|other| other == file);
            for ((from, to), kind) in &mut arrows {
                if let (Some(from), Some(to)) = (place(from), place(to)) {
                    *kind = if from < to { Kind::Circle } else { Kind::Up };
                }
            }
        }
        let mut floors = Self {
            floor: vec![0; imports.files.len()],
            arrows,
        };
        floors.build();
        while let Some(arrow) = floors.falls() {
            floors.arrows.insert(arrow, Kind::Circle);
            floors.build();
        }
        floors
    }

    /// Computes longest paths: repeats until no file rises any more. Without the arrows back up, there is no circle.
    fn build(&mut self) {
        let mut rises = true;
        while rises {
            rises = false;
            for ((from, to), kind) in &self.arrows {
                if *kind != Kind::Up && self.floor[*from] <= self.floor[*to] {
                    self.floor[*from] = self.floor[*to] + 1;
                    rises = true;
                }
            }
        }
    }

    /// Returns an arrow back up that is not necessary: no path leads from its end down to its start, so it may point
    /// down.
    fn falls(&self) -> Option<(usize, usize)> {
        let mut up = self.arrows.iter().filter(|(_, kind)| **kind == Kind::Up);
        let arrow = up.find(|((from, to), _)| self.floor[*from] >= self.floor[*to]);
        arrow.map(|(arrow, _)| *arrow)
    }
}

/// Returns an order of a circle's files with few arrows from a later one to an earlier one (Eades, Lin and Smyth).
/// Files that import most and are imported least come first.
fn top_down(imports: &Imports, circle: &[usize]) -> Vec<usize> {
    let mut left: BTreeSet<usize> = circle.iter().copied().collect();
    let (mut first, mut last) = (Vec::new(), Vec::new());
    while !left.is_empty() {
        let counts: Vec<(usize, usize, usize)> = left
            .iter()
            .map(|file| {
                let count = |is: &dyn Fn(usize, usize) -> Option<usize>| {
                    let arrows = imports.arrows.keys();
                    let others = arrows.filter_map(|(from, to)| is(*from, *to));
                    others.filter(|other| left.contains(other)).count()
                };
                let imported = count(&|from, to| (to == *file).then_some(from));
                let imports = count(&|from, to| (from == *file).then_some(to));
                (*file, imports, imported)
            })
            .collect();
        let ground = counts.iter().find(|(_, imports, _)| *imports == 0);
        let roof = counts.iter().find(|(_, _, imported)| *imported == 0);
        let file = match (ground, roof) {
            (Some((file, ..)), _) => {
                last.push(*file);
                *file
            }
            (None, Some((file, ..))) => {
                first.push(*file);
                *file
            }
            (None, None) => {
                let difference = |&&(_, imports, imported): &&(usize, usize, usize)| {
                    imports as i64 - imported as i64
                };
                let best = counts.iter().max_by_key(difference);
                let (file, ..) = best.expect("some are left");
                first.push(*file);
                *file
            }
        };
        left.remove(&file);
    }
    last.reverse();
    first.extend(last);
    first
}
