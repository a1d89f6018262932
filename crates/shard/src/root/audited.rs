//! The observer of a step's gradients, on behalf of the audit.
//!
//! Gradients do not carry their tags. The engine reports each event of a gradient in the function that computes it, and
//! the observer moves the tag from one [`Station`] to the next. A tag leaves its station when it is moved. So the tag of
//! a gradient that is lost is missing from the result, and a gradient that is used twice gets a tag that no sum expects.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn_fsdp_collectives::Operation as Collective;

use crate::audit::{Audit, Auditor, Tag, flags, tags};
use crate::copies::Generation;
use crate::schedule::Note;
use crate::unit::Unit;

/// Where a gradient of a parameter is between two events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Station {
    /// The backward of the use with this number.
    Use(u64),
    /// Held back for another backward.
    HeldBack,
    /// A parameter kept whole, which waits for the end of backward. The number is the generation's.
    Ended(u64),
    /// The result of a reduction, as it arrived.
    Arrived,
    /// A result that waits for a reduction over replicas or for the last backward.
    Sum,
}

/// A gradient of a reduction, as this rank gives it.
pub(super) struct GivenGradient<'a> {
    unit: &'a Unit,
    slot: usize,
    from: Station,
    /// False if this rank has no gradient, and gives zeros.
    is_there: bool,
}

impl<'a> GivenGradient<'a> {
    /// Describes the gradient of a slot, which may be missing.
    pub(super) fn of<T>(
        (unit, slot): (&'a Unit, usize),
        from: Station,
        gradient: Option<&T>,
    ) -> Self {
        Self {
            unit,
            slot,
            from,
            is_there: gradient.is_some(),
        }
    }
}

pub(super) struct Audited {
    pub(super) auditor: Auditor,
    /// The tags of the gradients on this rank, by parameter and station.
    tags: BTreeMap<(usize, Station), Tag>,
    /// The tags of reduced gradients until they are passed to Burn, by leaf.
    passing: BTreeMap<u64, Vec<Tag>>,
    /// The number of each unit's first parameter, followed by the total number of parameters.
    pub(super) first: Vec<usize>,
    /// The values whose gradients were reduced in this step.
    pub(super) reduced: Vec<Arc<Generation>>,
    /// The collectives that carried gradients, each with its unit; `None` for all parameters kept whole.
    pub(super) carried: Vec<(Option<usize>, String)>,
}

/// Audits nothing, and has no units.
impl Default for Audited {
    fn default() -> Self {
        Self::new(Audit::Off, 0)
    }
}

impl Audited {
    pub(super) fn new(audit: Audit, rank: usize) -> Self {
        Self {
            auditor: Auditor::new(audit, rank, 0),
            tags: BTreeMap::new(),
            passing: BTreeMap::new(),
            first: vec![0],
            reduced: Vec::new(),
            carried: Vec::new(),
        }
    }

    /// Resets the data for units with these numbers of parameters.
    pub(super) fn open(&mut self, units: impl Iterator<Item = usize>) {
        let mut all = 0;
        self.first = vec![0];
        for parameters in units {
            all += parameters;
            self.first.push(all);
        }
        self.auditor = self.auditor.over(all);
        self.tags.clear();
    }

    /// Returns the data after an error: the auditor and the units, without the step's gradients.
    pub(super) fn after_error(self) -> Self {
        Self {
            auditor: self.auditor.after_error(),
            first: self.first,
            ..Self::default()
        }
    }

    /// A gradient was computed for the use `use_id`.
    pub(super) fn came(&mut self, unit: &Unit, slot: usize, use_id: u64) {
        if let Some(parameter) = self.number(unit, slot) {
            let tag = self.auditor.came(parameter);
            self.add((parameter, Station::Use(use_id)), tag);
        }
    }

    /// The gradient at one station was added to the gradient at another, or has become it.
    pub(super) fn added(&mut self, unit: &Unit, slot: usize, from: Station, to: Station) {
        if let Some(parameter) = self.number(unit, slot) {
            let tag = self.take((parameter, from));
            self.add((parameter, to), tag);
        }
    }

    /// The sum of a reduction has arrived. `tag` returns its tag, from the notes of the ranks.
    pub(super) fn arrived(&mut self, unit: &Unit, slot: usize, tag: impl FnOnce() -> Tag) {
        if let Some(parameter) = self.number(unit, slot) {
            self.tags.insert((parameter, Station::Arrived), tag());
        }
    }

    /// A reduced gradient has become one of the gradients of `leaf` to pass to Burn.
    pub(super) fn passes(&mut self, unit: &Unit, slot: usize, from: Station, leaf: NodeId) {
        if let Some(parameter) = self.number(unit, slot) {
            let tag = self.take((parameter, from));
            self.passing.entry(leaf.value).or_default().push(tag);
        }
    }

    /// Gradients of these leaves were passed to Burn, or to the optimizer.
    pub(super) fn handed_over(&mut self, leaves: &[NodeId]) {
        for &leaf in leaves {
            let tag = self.passing.get_mut(&leaf.value).and_then(Vec::pop);
            let is_auditing = self.auditor.is_auditing();
            if let Some(parameter) = self.parameter_of(leaf).filter(|_| is_auditing) {
                let tag = tag.unwrap_or_else(|| self.auditor.stray(parameter));
                self.auditor.arrived(parameter, tag);
            }
        }
    }

    /// Ends the step: every gradient was passed on or waits for a later step.
    pub(super) fn end(&mut self) {
        self.reduced.clear();
        self.carried.clear();
        self.passing.clear();
        let waits = |at: &Station| matches!(at, Station::HeldBack | Station::Sum);
        self.tags.retain(|(_, at), _| waits(at));
    }

    /// A reduced gradient was dropped, because the parameter is frozen or another rank owns it.
    pub(super) fn dropped(&mut self, unit: &Unit, slot: usize, from: Station) {
        if let Some(parameter) = self.number(unit, slot) {
            self.tags.remove(&(parameter, from));
        }
    }

    /// Takes the tag of a gradient. A gradient that no event has brought here gets one that no sum expects.
    fn take(&mut self, at: (usize, Station)) -> Tag {
        let tag = self.tags.remove(&at);
        tag.unwrap_or_else(|| self.auditor.stray(at.0))
    }

    fn add(&mut self, at: (usize, Station), tag: Tag) {
        let earlier = self.tags.remove(&at);
        let sum = earlier.map_or(tag, |earlier| earlier.plus(tag));
        self.tags.insert(at, sum);
    }

    /// Returns the number of a parameter; `None` without an audit.
    fn number(&self, unit: &Unit, slot: usize) -> Option<usize> {
        if self.auditor.is_off() {
            return None;
        }
        self.first.get(unit.position() + 1)?;
        Some(self.first[unit.position()] + slot)
    }

    /// Notes that gradients of `generation` are being reduced.
    pub(super) fn reduces(&mut self, generation: &Arc<Generation>) {
        let is_known = self
            .reduced
            .iter()
            .any(|known| Arc::ptr_eq(known, generation));
        if self.auditor.is_auditing() && !is_known {
            self.reduced.push(generation.clone());
        }
    }

    /// Notes the collective that carries gradients of `unit`, or of all parameters kept whole.
    pub(super) fn carries(&mut self, unit: Option<&Unit>, collective: &Collective) {
        if self.auditor.is_auditing() {
            self.carried
                .push((unit.map(Unit::position), collective.to_string()));
        }
    }

    /// Returns the note of a reduction that takes these gradients from their stations.
    pub(super) fn note(&mut self, given: &[GivenGradient<'_>]) -> Vec<u8> {
        let (mut note, tags) = self.taken(given);
        note.extend(tags);
        note
    }

    /// Returns the note for a step's last exchange, with these gradients of whole parameters.
    pub(super) fn last_note(
        &mut self,
        wish: Vec<u8>,
        marks: Vec<u8>,
        given: &[GivenGradient<'_>],
    ) -> Note {
        let (used, tags) = self.taken(given);
        let is_audited = self.auditor.is_auditing();
        Note {
            wish,
            marks,
            used,
            tags,
            told: if is_audited {
                self.auditor.tell()
            } else {
                Vec::new()
            },
        }
    }

    /// Takes these gradients from their stations. Returns for each whether this rank has it, and its tag in an audited
    /// step.
    fn taken(&mut self, given: &[GivenGradient<'_>]) -> (Vec<u8>, Vec<u8>) {
        let tag = |given: &GivenGradient<'_>| {
            given
                .is_there
                .then(|| match self.number(given.unit, given.slot) {
                    Some(parameter) => self.take((parameter, given.from)),
                    None => Tag::UNKNOWN,
                })
        };
        let given: Vec<_> = given.iter().map(tag).collect();
        let tags = if self.auditor.is_auditing() {
            tags(given.iter().copied())
        } else {
            Vec::new()
        };
        (flags(given.into_iter()), tags)
    }

    /// Passes the audit data in the ranks' notes to the auditor.
    pub(super) fn hear(&mut self, notes: &[Note]) {
        if self.auditor.is_auditing() {
            self.auditor
                .hear(notes.iter().map(|note| note.told.as_slice()));
        }
    }

    /// Returns the unit and the slot of the parameter with this number.
    pub(super) fn owner(&self, parameter: usize) -> (usize, usize) {
        let unit = self.first.partition_point(|&first| first <= parameter) - 1;
        (unit, parameter - self.first[unit])
    }

    /// Returns the number of the parameter whose leaf is `node`.
    pub(super) fn parameter_of(&self, node: NodeId) -> Option<usize> {
        self.reduced.iter().find_map(|generation| {
            let mut slots = 0..generation.unit.slots.len();
            let slot = slots.find(|&slot| generation.node(slot) == Some(node))?;
            Some(self.first.get(generation.unit.position())? + slot)
        })
    }
}
