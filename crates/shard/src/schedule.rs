//! The order of a step's gathers and reductions, as data.
//!
//! The first step agrees on the order operation by operation; the steps after it follow what was
//! recorded, which is what makes prefetching possible and lets a rank take part in an operation
//! that only other ranks need. The argument why all ranks issue the same sequence is in the
//! README beside this file.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn_fsdp_collectives::{Label, ProcessGroup};

use crate::error::Error;

/// One operation of a step; units by their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    /// Gather a unit for its forward.
    UnshardForward(usize),
    /// Gather a unit for its backward.
    UnshardBackward(usize),
    /// Reduce a unit's gradients.
    Reduce(usize),
    /// End of backward: reduce the parameters kept whole.
    Finish,
}

impl Operation {
    /// The unit that it is about.
    pub(crate) fn unit(self) -> Option<usize> {
        match self {
            Self::UnshardForward(unit) | Self::UnshardBackward(unit) | Self::Reduce(unit) => {
                Some(unit)
            }
            Self::Finish => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnshardForward(unit) => write!(f, "forward unshard of unit {unit}"),
            Self::UnshardBackward(unit) => write!(f, "backward unshard of unit {unit}"),
            Self::Reduce(unit) => write!(f, "reduction of unit {unit}"),
            Self::Finish => f.write_str("end of backward"),
        }
    }
}

/// What to do next on the way to the operation wanted.
pub(crate) struct Step {
    /// The operation to issue now.
    pub(crate) operation: Operation,
    /// Its place in the recorded order, if that is being followed.
    pub(crate) position: Option<usize>,
    /// Whether it is the one that was wanted, not one that only others need.
    pub(crate) wanted: bool,
}

/// The order of operations of one rank's root.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    recorded: Vec<Operation>,
    needed: Vec<bool>,
    cursor: usize,
    mode: Mode,
}

/// The orders of one rank's root: one for each choice of units that reduce, because a step without
/// reductions is another sequence than a step with them.
#[derive(Debug, Default)]
pub(crate) struct Schedules {
    /// By unit: whether it reduces in the step under way.
    choice: Vec<bool>,
    known: BTreeMap<Vec<bool>, Schedule>,
}

impl Schedules {
    /// Takes the order for `choice`, the same on all ranks.
    pub(crate) fn select(&mut self, choice: Vec<bool>) {
        if choice != self.choice {
            if let Some(left) = self.known.get_mut(&self.choice)
                && left.cursor > 0
            {
                left.rewind();
            }
            self.choice = choice;
        }
    }

    /// The order of the step under way.
    pub(crate) fn current(&mut self) -> &mut Schedule {
        self.known.entry(self.choice.clone()).or_default()
    }

    /// The order of the last step that has one.
    pub(crate) fn last(&self) -> Option<&Schedule> {
        self.known.get(&self.choice)
    }
}

#[derive(Debug, Default)]
enum Mode {
    /// Every operation is agreed on with the other ranks before it is issued.
    #[default]
    Recording,
    /// Operations come in the recorded order.
    Following,
}

impl Schedule {
    /// The recorded order.
    pub(crate) fn recorded(&self) -> &[Operation] {
        &self.recorded
    }

    /// A number that is equal on two ranks if their orders are.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.recorded.hash(&mut hasher);
        hasher.finish()
    }

    /// The next operation to issue by a rank that needs `wanted`.
    ///
    /// Collective while the order is being recorded.
    pub(crate) fn next(
        &mut self,
        wanted: Operation,
        group: &ProcessGroup,
        label: impl FnOnce() -> Label,
    ) -> Result<Step, Error> {
        if let Mode::Following = self.mode {
            let rest = &self.recorded[self.cursor..];
            let ahead = match wanted {
                Operation::Finish => Some(rest.len()),
                _ => rest.iter().position(|&operation| operation == wanted),
            };
            if let Some(ahead) = ahead {
                return Ok(self.follow(wanted, ahead));
            }
            // Not in the order any more: agree again from here on.
            self.recorded.truncate(self.cursor);
            self.needed.truncate(self.cursor);
            self.mode = Mode::Recording;
        }
        let operation = self.agree(wanted, group, label)?;
        if operation != Operation::Finish {
            self.recorded.push(operation);
            self.needed.push(true);
            self.cursor += 1;
        }
        Ok(Step {
            operation,
            position: None,
            wanted: operation == wanted,
        })
    }

    fn follow(&mut self, wanted: Operation, ahead: usize) -> Step {
        if ahead == 0 && wanted == Operation::Finish {
            return Step {
                operation: wanted,
                position: None,
                wanted: true,
            };
        }
        let position = self.cursor;
        self.cursor += 1;
        self.needed[position] = ahead == 0;
        Step {
            operation: self.recorded[position],
            position: Some(position),
            wanted: ahead == 0,
        }
    }

    /// Which of the operations that the ranks want now comes first.
    fn agree(
        &self,
        wanted: Operation,
        group: &ProcessGroup,
        label: impl FnOnce() -> Label,
    ) -> Result<Operation, Error> {
        if group.size() == 1 {
            return Ok(wanted);
        }
        let wishes = group.exchange(label(), encode(wanted))?;
        let wishes = wishes.iter().map(|wish| decode(wish));
        Ok(wishes
            .min_by_key(|&wish| self.rank_of(wish))
            .unwrap_or(wanted))
    }

    /// Forward before backward; forward in module order, backward against the forward order,
    /// each unit's gather before its reduction.
    fn rank_of(&self, operation: Operation) -> (u8, usize, u8) {
        let latest_first = |unit| {
            let forward = Operation::UnshardForward(unit);
            let position = self.recorded.iter().rposition(|&op| op == forward);
            usize::MAX - position.unwrap_or(0)
        };
        match operation {
            Operation::UnshardForward(unit) => (0, unit, 0),
            Operation::UnshardBackward(unit) => (1, latest_first(unit), 0),
            Operation::Reduce(unit) => (1, latest_first(unit), 1),
            Operation::Finish => (2, 0, 0),
        }
    }

    /// The next gather of the same direction after `position`, for prefetching.
    pub(crate) fn following_unshard(&self, position: usize) -> Option<(usize, Operation)> {
        let direction = std::mem::discriminant(&self.recorded[position]);
        let gathers = self.recorded.iter().copied().enumerate().skip(position + 1);
        // A gather for the other direction ends the search: prefetching stays within one pass.
        let mut gathers = gathers.filter(|(_, operation)| {
            matches!(
                operation,
                Operation::UnshardForward(_) | Operation::UnshardBackward(_)
            )
        });
        gathers
            .next()
            .filter(|(_, operation)| std::mem::discriminant(operation) == direction)
    }

    /// One byte per recorded operation: did this rank need it?
    pub(crate) fn needs(&self) -> Vec<u8> {
        self.needed.iter().map(|&needed| u8::from(needed)).collect()
    }

    /// Ends the step. What no rank needed is dropped from the order; `needs` has one entry a rank.
    pub(crate) fn close(&mut self, needs: &[Vec<u8>]) {
        let mut position = 0;
        self.recorded.retain(|_| {
            let needed = needs
                .iter()
                .any(|need| need.get(position).is_some_and(|&byte| byte != 0));
            position += 1;
            needed
        });
        self.rewind();
    }

    fn rewind(&mut self) {
        self.cursor = 0;
        self.needed = vec![false; self.recorded.len()];
        self.mode = Mode::Following;
    }
}

fn encode(operation: Operation) -> Vec<u8> {
    let (kind, unit) = match operation {
        Operation::UnshardForward(unit) => (0u64, unit),
        Operation::UnshardBackward(unit) => (1, unit),
        Operation::Reduce(unit) => (2, unit),
        Operation::Finish => (3, 0),
    };
    [kind.to_le_bytes(), (unit as u64).to_le_bytes()].concat()
}

fn decode(bytes: &[u8]) -> Operation {
    let number = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let unit = number(8) as usize;
    match number(0) {
        0 => Operation::UnshardForward(unit),
        1 => Operation::UnshardBackward(unit),
        2 => Operation::Reduce(unit),
        _ => Operation::Finish,
    }
}
