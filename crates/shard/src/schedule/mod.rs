//! The order of a step's gathers and reductions, as data.
//!
//! The first step agrees on the order operation by operation, and later steps follow the recorded order. This enables
//! prefetching and lets a rank take part in an operation that only other ranks need. If the recorded order lacks an
//! operation that a rank needs, all ranks advance to its end and agree on the remaining operations, which are inserted
//! into the order for the next step. The README next to this file explains why all ranks issue the same sequence.

mod note;
mod operation;

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};

use burn_fsdp_collectives::{Fingerprint, Label, ProcessGroup};

use crate::error::Error;

use note::Wish;

pub(crate) use note::Note;
pub(crate) use operation::Operation;

/// Number of consecutive unneeded steps after which an operation is dropped from the order.
const IDLE_LIMIT: u32 = 32;
/// Maximum number of gathers of a unit that the order keeps although no backward follows, as for a teacher model.
const ABANDONED_LIMIT: usize = 1;

/// Marks an operation that this rank asked for.
const ASKED: u8 = 1;
/// Marks a gather whose backward has ended.
const ENDED: u8 = 2;
/// Marks a gather that was prefetched for the wrong copy of the module.
const MISLED: u8 = 4;

/// The next action of a rank that wants an operation.
#[derive(Debug)]
pub(crate) enum Next {
    /// Issue an operation.
    Issue(Step),
    /// Meet the other ranks at the end of the recorded order, and exchange wishes.
    Meet,
    /// Agree with the other ranks on the next operation.
    Agree,
}

/// An operation to issue now.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) operation: Operation,
    /// Position in the recorded order; `None` if ranks agree on the operations.
    pub(crate) position: Option<usize>,
    /// True if this rank requested the operation; false if only others need it.
    pub(crate) wanted: bool,
}

/// The orders of one rank's root: one for each set of units that reduce, because steps with and without reductions have
/// different sequences.
#[derive(Debug, Default)]
pub(crate) struct Schedules {
    /// For each unit, whether it reduces in the current step.
    choice: Vec<bool>,
    current: Schedule,
    /// The orders for other sets of units.
    known: BTreeMap<Vec<bool>, Schedule>,
}

impl Schedules {
    /// Selects the order for `choice`, which is the same on all ranks.
    pub(crate) fn select(&mut self, choice: Vec<bool>) {
        if choice != self.choice {
            let next = self.known.remove(&choice).unwrap_or_default();
            let mut left = std::mem::replace(&mut self.current, next);
            left.abandon();
            let choice = std::mem::replace(&mut self.choice, choice);
            self.known.insert(choice, left);
        }
    }

    pub(crate) fn current(&mut self) -> &mut Schedule {
        &mut self.current
    }

    /// Returns the order of the last step.
    pub(crate) fn last(&self) -> &Schedule {
        &self.current
    }
}

/// The order of operations of one rank's root.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// The recorded operations, the same on all ranks.
    recorded: Vec<Entry>,
    /// This rank's marks for each recorded operation in the current step.
    marks: Vec<u8>,
    /// The place of the next operation to issue.
    cursor: usize,
    /// The place after the operation that this rank last asked for. It equals the cursor as long as this rank finds
    /// what it needs; otherwise it falls behind.
    aligned: usize,
    /// The places of the gathers whose backward has not ended yet, by the number of their use.
    uses: BTreeMap<u64, usize>,
    last_asked: Option<usize>,
    phase: Phase,
}

#[derive(Debug)]
struct Entry {
    operation: Operation,
    /// Number of consecutive steps in which no rank asked for the operation, or in which it was abandoned.
    idle: u32,
    /// True if any rank requested the operation in the last step.
    used: bool,
    /// False after the operation was prefetched for the wrong copy of the module.
    ahead: bool,
    /// True if the operation was agreed on in this step.
    fresh: bool,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Ranks agree on every operation before it is issued.
    #[default]
    Agreeing,
    /// Operations are issued in the recorded order.
    Following,
}

impl Schedule {
    pub(crate) fn operations(&self) -> impl Iterator<Item = Operation> + '_ {
        self.recorded.iter().map(|entry| entry.operation)
    }

    /// Returns the operations that some rank asked for in the last step.
    pub(crate) fn used(&self) -> impl Iterator<Item = Operation> + '_ {
        let used = self.recorded.iter().filter(|entry| entry.used);
        used.map(|entry| entry.operation)
    }

    /// Returns the hash of the order, which is equal on ranks with equal orders.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = Fingerprint::new();
        self.recorded.len().hash(&mut hasher);
        self.operations()
            .for_each(|operation| operation.hash(&mut hasher));
        hasher.finish()
    }

    /// Returns true if a recorded order is being followed, and nothing has been issued in this step.
    pub(crate) fn is_at_start(&self) -> bool {
        self.phase == Phase::Following && self.cursor == 0
    }

    /// Returns true if nothing has been issued in this step, with or without a recorded order.
    pub(crate) fn is_untouched(&self) -> bool {
        self.cursor == 0 && (self.phase == Phase::Following || self.recorded.is_empty())
    }

    /// Returns true if the rest of the recorded order has no operation of `unit`. All ranks get the same answer at the
    /// same place in the order. While ranks agree on operations, there is no rest.
    pub(crate) fn is_done_with(&self, unit: usize) -> bool {
        let mut rest = self.recorded[self.cursor..].iter();
        rest.all(|entry| entry.operation.unit() != Some(unit))
    }

    /// Drops the operations of units that modules no longer hold.
    pub(crate) fn prune(&mut self, is_held: impl Fn(usize) -> bool) {
        self.recorded
            .retain(|entry| entry.operation.unit().is_none_or(&is_held));
        self.rewind();
    }

    /// Returns the next action of a rank that needs `wanted`.
    pub(crate) fn next(&mut self, wanted: Operation) -> Next {
        if self.phase == Phase::Agreeing {
            return Next::Agree;
        }
        let rest = &self.recorded[self.cursor..];
        let Some(next) = rest.first() else {
            return Next::Meet;
        };
        let operation = next.operation;
        let position = self.cursor;
        self.cursor += 1;
        let is_wanted = operation == wanted;
        if is_wanted {
            self.ask(position, wanted);
        }
        Next::Issue(Step {
            operation,
            position: Some(position),
            wanted: is_wanted,
        })
    }

    /// Marks the operation at `position`, which this rank asked for.
    fn ask(&mut self, position: usize, wanted: Operation) {
        self.marks[position] |= match wanted {
            Operation::UnshardForward(_) => ASKED,
            _ => ASKED | ENDED,
        };
        self.aligned = position + 1;
        self.last_asked = Some(position);
    }

    /// Notes that the last requested gather is for the forward of `use_id`.
    pub(crate) fn begin_use(&mut self, use_id: u64) {
        if let Some(position) = self.last_asked.take() {
            self.uses.insert(use_id, position);
        }
    }

    /// Notes that the backward of `use_id` has ended, or that the engine will not see its end.
    pub(crate) fn end_use(&mut self, use_id: u64) {
        if let Some(position) = self.uses.remove(&use_id) {
            self.marks[position] |= ENDED;
        }
    }

    /// Notes that the prefetched gather at `position` was for the wrong copy of the module.
    pub(crate) fn mislead(&mut self, position: usize) {
        self.marks[position] |= MISLED;
        // This rank's next request is for the same place.
        self.aligned = position;
    }

    /// Encodes this rank's wish for `wanted`, to send to the other ranks.
    pub(crate) fn wish(&self, wanted: Operation) -> Vec<u8> {
        let place = match wanted {
            Operation::Finish => None,
            _ => match self.find(wanted) {
                Some(_) => None,
                None => Some(self.aligned),
            },
        };
        Wish {
            operation: wanted,
            place,
        }
        .encode()
    }

    /// Returns the next place of `wanted` from this rank's place in the order.
    fn find(&self, wanted: Operation) -> Option<usize> {
        let mut rest = self.recorded.iter().skip(self.aligned);
        let ahead = rest.position(|entry| entry.operation == wanted)?;
        Some(self.aligned + ahead)
    }

    /// Exchanges wishes with the other ranks, and returns them. Collective.
    pub(crate) fn ask_all(
        &self,
        wanted: Operation,
        group: &ProcessGroup,
        label: Label,
    ) -> Result<Vec<Vec<u8>>, Error> {
        let wish = self.wish(wanted);
        if group.size() == 1 {
            return Ok(vec![wish]);
        }
        Ok(group.exchange(label, wish)?)
    }

    /// Returns the first operation that any rank wants; `None` if all ranks are at the end of backward.
    ///
    /// An operation that the order lacks is inserted where the most advanced rank would have expected it.
    pub(crate) fn agree(&mut self, wanted: Operation, wishes: &[Vec<u8>]) -> Option<Step> {
        let wishes: Vec<_> = wishes.iter().map(|wish| Wish::decode(wish)).collect();
        let wished = wishes.iter().map(|wish| wish.operation);
        let operation = wished.min_by_key(|&operation| self.rank_of(operation))?;
        if operation == Operation::Finish {
            return None;
        }
        self.phase = Phase::Agreeing;
        let found = (operation == wanted).then(|| self.find(wanted)).flatten();
        let places = wishes.iter().filter(|wish| wish.operation == operation);
        let place = places.filter_map(|wish| wish.place).max();
        if let Some(place) = place {
            self.insert(place, operation);
        }
        if operation == wanted {
            let shift = |found: usize| match place {
                Some(place) if place <= found => found + 1,
                _ => found,
            };
            if let Some(position) = found.map(shift).or(place) {
                self.ask(position, wanted);
            }
        }
        Some(Step {
            operation,
            position: None,
            wanted: operation == wanted,
        })
    }

    fn insert(&mut self, place: usize, operation: Operation) {
        let entry = Entry {
            operation,
            idle: 0,
            used: false,
            ahead: true,
            fresh: true,
        };
        self.recorded.insert(place, entry);
        self.marks.insert(place, 0);
        for position in self.uses.values_mut().chain(self.last_asked.as_mut()) {
            *position += usize::from(*position >= place);
        }
        self.cursor += 1;
        self.aligned += usize::from(self.aligned >= place);
    }

    /// Returns the sort key of an operation: forward before backward. Forward is in module order. Backward is in
    /// reverse forward order, with each unit's gather before its reduction.
    fn rank_of(&self, operation: Operation) -> (u8, usize, u8) {
        let latest_first = |unit| {
            let forward = Operation::UnshardForward(unit);
            let position = self.recorded.iter().rposition(|e| e.operation == forward);
            usize::MAX - position.unwrap_or(0)
        };
        match operation {
            Operation::UnshardForward(unit) => (0, unit, 0),
            Operation::UnshardBackward(unit) => (1, latest_first(unit), 0),
            Operation::Reduce(unit) => (1, latest_first(unit), 1),
            // This comes last, so no rank finishes while another one still needs an operation.
            Operation::Finish => (2, 0, 0),
        }
    }

    /// Returns the next gather of the same direction after `last`, if it may already start at `position`. The answer
    /// depends only on the order.
    pub(crate) fn following_unshard(
        &self,
        position: usize,
        last: usize,
    ) -> Option<(usize, Operation)> {
        let direction = std::mem::discriminant(&self.recorded.get(position)?.operation);
        let mut later = self.recorded.iter().enumerate().skip(last + 1);
        let (place, entry) = later.find(|(_, entry)| entry.operation.is_gather())?;
        // A gather for the other direction ends the search: prefetching stays within one pass.
        if std::mem::discriminant(&entry.operation) != direction || !entry.ahead {
            return None;
        }
        (!self.is_busy(position, place)).then_some((place, entry.operation))
    }

    /// Returns the gathers for backward that come after `gather` if backward reverses the forward of this step; none if
    /// `gather` is for forward.
    pub(crate) fn reversed_after(&self, gather: Operation) -> Vec<Operation> {
        let Operation::UnshardBackward(last) = gather else {
            return Vec::new();
        };
        let forward = self.operations().filter_map(|operation| match operation {
            Operation::UnshardForward(unit) => Some(unit),
            _ => None,
        });
        let forward: Vec<_> = forward.collect();
        let place = forward.iter().rposition(|unit| *unit == last);
        let earlier = forward[..place.unwrap_or(0)].iter().rev();
        earlier
            .map(|unit| Operation::UnshardBackward(*unit))
            .collect()
    }

    /// Returns the place of the next `gather` after `position`, if it may already start there. The answer depends only
    /// on the order.
    pub(crate) fn next_unshard(&self, position: usize, gather: Operation) -> Option<usize> {
        let direction = std::mem::discriminant(&gather);
        let later = self.recorded.iter().enumerate().skip(position + 1);
        let mut gathers = later.filter(|(_, entry)| entry.operation.is_gather());
        let (place, entry) = gathers.find(|(_, entry)| {
            entry.operation == gather || std::mem::discriminant(&entry.operation) != direction
        })?;
        let may_start = entry.operation == gather && entry.ahead && !self.is_busy(position, place);
        may_start.then_some(place)
    }

    /// Returns true if operations between `position` and `place` use the unit of the operation at `place`. These must
    /// be complete before that operation may start.
    fn is_busy(&self, position: usize, place: usize) -> bool {
        let unit = self.recorded[place].operation.unit();
        let mut between = self.recorded[position..place].iter();
        between.any(|earlier| earlier.operation.unit() == unit)
    }

    pub(crate) fn marks(&self) -> &[u8] {
        &self.marks
    }

    /// Ends the step, and creates the next step's order from the marks of all ranks.
    pub(crate) fn close(&mut self, marks: &[Vec<u8>]) {
        let mut abandoned: HashMap<Operation, usize> = HashMap::new();
        for (position, entry) in self.recorded.iter_mut().enumerate() {
            let marks = marks.iter().filter_map(|marks| marks.get(position));
            let marks = marks.fold(0, |all, mark| all | mark);
            entry.used = marks & ASKED != 0;
            entry.ahead &= marks & MISLED == 0;
            let mut is_needed = entry.used;
            if is_needed && marks & ENDED == 0 {
                let number = abandoned.entry(entry.operation).or_default();
                *number += 1;
                is_needed = *number <= ABANDONED_LIMIT;
            }
            entry.idle = if is_needed { 0 } else { entry.idle + 1 };
        }
        self.recorded.retain(|entry| {
            if entry.fresh {
                entry.idle == 0
            } else {
                // The marks are sent with the last reduction and equal on all ranks, so all ranks drop the same entries.
                entry.idle < IDLE_LIMIT
            }
        });
        self.recorded
            .iter_mut()
            .for_each(|entry| entry.fresh = false);
        self.rewind();
    }

    /// Abandons the current step, on all ranks.
    fn abandon(&mut self) {
        if self.phase == Phase::Following || !self.recorded.iter().all(|entry| entry.fresh) {
            self.recorded.retain(|entry| !entry.fresh);
            self.rewind();
        } else {
            *self = Self::default();
        }
    }

    fn rewind(&mut self) {
        self.cursor = 0;
        self.aligned = 0;
        self.uses.clear();
        self.last_asked = None;
        self.marks = vec![0; self.recorded.len()];
        self.phase = Phase::Following;
    }
}
