//! The auditor of one rank, which compares the computed gradients of all ranks with the gradients passed to Burn.

use std::collections::BTreeMap;
use std::ops::Range;

use burn_fsdp_mesh::field::Element;

use super::finding::{Finding, Sum};
use super::{Audit, Tag};

/// Size in bytes of one number in a note.
const LEN: usize = size_of::<u64>();

/// Whether the current step is audited.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Step {
    /// No step has begun since the last one ended.
    #[default]
    Between,
    /// The step is not audited.
    Plain,
    /// The step is audited, and its notes carry tags. `choice` has the switches of the units, and `order` is the hash
    /// of the order of operations.
    Audited { choice: Vec<bool>, order: u64 },
}

/// Whether a reduced gradient is due on this rank when a backward ends, if any gradient was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// A gradient is due.
    Yes,
    /// No gradient is due: the unit does not reduce, its reduced sums wait for a later step, another rank owns the
    /// parameter, or the parameter is frozen.
    No,
    /// This rank cannot determine whether a gradient is due.
    Unclear,
}

/// What to expect of a parameter's gradient on this rank when a backward ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) due: Due,
    /// The factor applied to the sum over all ranks.
    pub(crate) scale: Tag,
}

/// A gradient that differs from the expected one.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) parameter: usize,
    /// The gradients that the expected sum consists of.
    pub(crate) expected: Sum,
    /// How the actual gradient differs from it.
    pub(crate) finding: Finding,
}

#[derive(Debug)]
pub(crate) struct Auditor {
    audit: Audit,
    rank: usize,
    /// The numbers of the gradients computed but not yet reduced, by parameter.
    open: Vec<Range<u64>>,
    step: Step,
    /// For each setting of the unit switches, the hash of the order in its last audited step.
    followed: BTreeMap<Vec<bool>, u64>,
    /// The numbers of the gradients computed on each rank, by parameter; `None` for a rank that does not audit.
    told: Vec<Option<Vec<Range<u64>>>>,
    /// The tag of the gradient passed to Burn, by parameter.
    arrived: Vec<Option<Tag>>,
    num_audited: u64,
}

impl Auditor {
    /// Creates the auditor of rank `rank`, for this many parameters.
    pub(crate) fn new(audit: Audit, rank: usize, parameters: usize) -> Self {
        Self {
            audit,
            rank,
            open: vec![0..0; parameters],
            step: Step::Between,
            followed: BTreeMap::new(),
            told: Vec::new(),
            arrived: vec![None; parameters],
            num_audited: 0,
        }
    }

    /// Returns a new auditor for the same rank and setting, with this many parameters.
    pub(crate) fn over(&self, parameters: usize) -> Self {
        Self::new(self.audit, self.rank, parameters)
    }

    /// Numbers a new gradient of `parameter` on this rank, and returns its tag.
    pub(crate) fn came(&mut self, parameter: usize) -> Tag {
        if self.is_off() {
            return Tag::UNKNOWN;
        }
        let number = self.open[parameter].end;
        self.open[parameter].end += 1;
        Tag::draw(self.rank, parameter, number)
    }

    /// Returns the tag of a gradient of `parameter` that no event has announced. No sum expects it.
    pub(crate) fn stray(&self, parameter: usize) -> Tag {
        Tag::draw(self.rank, parameter, u64::MAX)
    }

    /// Begins a step. Does nothing if a step is in progress and past its first operation (`is_at_start` is false).
    /// `choice` returns the switches of the units, and `order` the hash of the order to follow. Both are equal on all
    /// ranks.
    pub(crate) fn begin(
        &mut self,
        is_at_start: bool,
        choice: impl FnOnce() -> Vec<bool>,
        order: impl FnOnce() -> u64,
    ) {
        if self.audit == Audit::Off || (self.step != Step::Between && !is_at_start) {
            return;
        }
        let (choice, order) = (choice(), order());
        let is_new = self.followed.get(&choice) != Some(&order);
        self.step = if is_new || self.audit == Audit::EveryStep {
            Step::Audited { choice, order }
        } else {
            Step::Plain
        };
    }

    /// Returns true if no step is audited.
    pub(crate) fn is_off(&self) -> bool {
        self.audit == Audit::Off
    }

    pub(crate) fn is_auditing(&self) -> bool {
        matches!(self.step, Step::Audited { .. })
    }

    /// Returns the number of audits that had all ranks' data and found no fault.
    pub(crate) fn num_audited(&self) -> u64 {
        self.num_audited
    }

    /// Encodes the numbers of this rank's gradients, to send to the other ranks at the end of backward.
    pub(crate) fn tell(&self) -> Vec<u8> {
        let numbers = self.open.iter().flat_map(|open| [open.start, open.end]);
        let numbers = std::iter::once(self.rank as u64).chain(numbers);
        numbers.flat_map(u64::to_le_bytes).collect()
    }

    /// Records the messages of all ranks, in rank order. They replace the messages of earlier exchanges, which did not
    /// end backward.
    pub(crate) fn hear<'a>(&mut self, told: impl Iterator<Item = &'a [u8]>) {
        let parameters = self.open.len();
        let decode = |(rank, bytes): (usize, &[u8])| {
            let words = bytes.chunks_exact(LEN);
            let words = words.map(|word| word.try_into().map_or(0, u64::from_le_bytes));
            let words: Vec<u64> = words.collect();
            let (&teller, numbers) = words.split_first()?;
            let is_whole = teller == rank as u64 && numbers.len() == 2 * parameters;
            is_whole.then(|| {
                numbers
                    .chunks_exact(2)
                    .map(|pair| pair[0]..pair[1])
                    .collect()
            })
        };
        self.told = told.enumerate().map(decode).collect();
    }

    /// Records that a reduced gradient of `parameter` was passed to Burn.
    pub(crate) fn arrived(&mut self, parameter: usize, tag: Tag) {
        let arrived = &mut self.arrived[parameter];
        *arrived = Some(arrived.map_or(tag, |earlier| earlier.plus(tag)));
    }

    /// Returns the first fault of this step, if any. `groups_of` returns the named groups of ranks over which a
    /// parameter's gradient is summed, and `wanted` what to expect of it.
    pub(crate) fn fault(
        &mut self,
        groups_of: impl Fn(usize) -> Vec<(String, Vec<usize>)>,
        wanted: impl Fn(usize) -> Wanted,
    ) -> Option<Fault> {
        let told: Option<Vec<_>> = self.told.iter().map(Option::as_ref).collect();
        let told = told.filter(|told| self.is_auditing() && !told.is_empty())?;
        let sum = |parameter: usize| {
            Sum::of(
                parameter,
                told.iter().map(|ranges| ranges[parameter].clone()),
            )
        };
        // The expected gradients of other parameters, to recognize one of them instead of this one.
        let of_others = |found: Element, own: usize| {
            let mut others = (0..self.open.len()).filter(|&other| other != own);
            others.find(|&other| {
                let expected = sum(other).tag().times(wanted(other).scale).element();
                found != 0 && expected == Some(found)
            })
        };
        for parameter in 0..self.open.len() {
            let expected = sum(parameter);
            if expected.number() == 0 && self.arrived[parameter].is_none() {
                continue;
            }
            let Wanted { due, scale } = wanted(parameter);
            let is_due = due == Due::Yes && expected.number() > 0;
            let finding = match (due, self.arrived[parameter]) {
                (Due::Unclear, _) => continue,
                (_, None) if is_due => Finding::Nothing,
                (_, None) => continue,
                (_, Some(_)) if !is_due => Finding::Uncalled,
                (_, Some(tag)) => {
                    let expected_tag = expected.tag().times(scale);
                    let (Some(found), Some(_)) = (tag.element(), expected_tag.element()) else {
                        continue;
                    };
                    if tag == expected_tag {
                        continue;
                    }
                    let of_others = |found| of_others(found, parameter);
                    Finding::of(found, &expected, scale, &groups_of(parameter), of_others)
                }
            };
            return Some(Fault {
                parameter,
                expected,
                finding,
            });
        }
        self.num_audited += 1;
        None
    }

    /// Ends the step, audited or not. `is_through` returns true for a parameter whose gradients have been reduced, or
    /// never will be.
    pub(crate) fn end_step(&mut self, is_through: impl Fn(usize) -> bool) {
        match std::mem::take(&mut self.step) {
            Step::Between => return,
            Step::Plain => {}
            Step::Audited { choice, order } => {
                self.followed.insert(choice, order);
            }
        }
        self.told.clear();
        self.arrived.fill(None);
        for (parameter, open) in self.open.iter_mut().enumerate() {
            if is_through(parameter) {
                open.start = open.end;
            }
        }
    }

    /// Returns the auditor after an error: all gradients are gone, and every order counts as new.
    pub(crate) fn after_error(mut self) -> Self {
        self.step = Step::Plain;
        self.end_step(|_| true);
        self.followed.clear();
        self
    }
}
