//! The data that the audit of a step needs.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn_fsdp_collectives::Operation as Collective;

use crate::audit::{Audit, Auditor, Tag, flags, tags};
use crate::copies::Generation;
use crate::schedule::Note;
use crate::unit::Unit;

pub(super) struct Audited {
    pub(super) auditor: Auditor,
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
    }

    /// Returns the data after an error: the auditor and the units, without the step's gradients.
    pub(super) fn after_error(self) -> Self {
        Self {
            auditor: self.auditor.after_error(),
            first: self.first,
            reduced: Vec::new(),
            carried: Vec::new(),
        }
    }

    pub(super) fn came(&mut self, unit: &Unit, slot: usize) -> Tag {
        match self.first.get(unit.position() + 1) {
            Some(_) => self.auditor.came(self.first[unit.position()] + slot),
            None => Tag::UNKNOWN,
        }
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

    /// Returns the note of a reduction of gradients with these tags, which are `None` for gradients that this rank
    /// lacks.
    pub(super) fn note(&self, given: impl Iterator<Item = Option<Tag>> + Clone) -> Vec<u8> {
        let mut note = flags(given.clone());
        if self.auditor.is_auditing() {
            note.extend(tags(given));
        }
        note
    }

    /// Returns the note for a step's last exchange, with these tags for the gradients of whole parameters.
    pub(super) fn last_note(
        &self,
        wish: Vec<u8>,
        marks: Vec<u8>,
        given: impl Iterator<Item = Option<Tag>> + Clone,
    ) -> Note {
        let is_audited = self.auditor.is_auditing();
        Note {
            wish,
            marks,
            used: flags(given.clone()),
            tags: if is_audited { tags(given) } else { Vec::new() },
            told: if is_audited {
                self.auditor.tell()
            } else {
                Vec::new()
            },
        }
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
