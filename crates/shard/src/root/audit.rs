//! The audit of a step's gradients, in terms of the root's units instead of parameter numbers.

use std::fmt::Write;

use burn::backend::autodiff::NodeId;
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_mesh::field;

use super::audited::Audited;
use super::state::{Progress, Root};
use crate::audit::{Audit, Auditor, Due, Fault, Tag, Wanted};
use crate::copies::Copies;
use crate::divide_factors::DivideFactors;
use crate::error::Error;
use crate::schedule::Operation;
use crate::slot::Holding;
use crate::unit::Unit;

/// Maximum number of operations that an error lists.
const MOST_OPERATIONS: usize = 64;

/// The state of a root's units at the end of a step.
struct AtEnd<'a> {
    root: &'a Root,
    audited: &'a Audited,
    copies: Vec<Option<Copies>>,
    progress: &'a Progress,
}

impl AtEnd<'_> {
    fn slot(&self, parameter: usize) -> Option<(&Unit, usize)> {
        let (unit, slot) = self.audited.owner(parameter);
        Some((&self.copies.get(unit)?.as_ref()?.unit, slot))
    }

    /// Returns true if gradients of `parameter` are reduced in this step instead of a later one.
    fn is_reduced(&self, parameter: usize) -> bool {
        self.slot(parameter).is_none_or(|(unit, slot)| {
            let crosses = unit.crosses() || unit.slots[slot].holding == Holding::Whole;
            unit.syncs() && crosses && self.root.is_last()
        })
    }

    fn due(&self, unit: &Unit, slot: usize) -> Due {
        if unit.slots[slot].is_elsewhere(unit.groups.shard.rank()) {
            return Due::No;
        }
        let reduced = self.audited.reduced.iter();
        let of_unit = reduced.filter(|generation| generation.unit.position() == unit.position());
        let mut trained: Vec<_> = of_unit
            .map(|generation| generation.is_trainable(slot))
            .collect();
        if trained.is_empty() {
            let copies = self.copies[unit.position()].as_ref();
            let copy = copies.and_then(|copies| copies.in_copy(self.progress.order.copy));
            trained.extend(copy.map(|copy| copy.is_trainable(slot)));
        }
        match (trained.contains(&true), trained.contains(&false)) {
            (true, false) => Due::Yes,
            // The parameter is frozen in one of the copies used, and the held-back gradients may be from that copy.
            (true, true) => Due::Unclear,
            (false, _) => Due::No,
        }
    }

    fn wanted(&self, parameter: usize) -> Wanted {
        let is_reduced = self.is_reduced(parameter);
        let Some((unit, index)) = self.slot(parameter) else {
            let (due, scale) = (Due::Unclear, Tag::UNKNOWN);
            return Wanted { due, scale };
        };
        Wanted {
            due: if is_reduced {
                self.due(unit, index)
            } else {
                Due::No
            },
            scale: scale(unit.factors(), self.root.group.size()),
        }
    }

    /// Returns the groups over which the gradient of `parameter` is summed, as ranks of the root's group.
    fn groups(&self, parameter: usize) -> Vec<(String, Vec<usize>)> {
        let all = self.root.group.members();
        let Some((unit, _)) = self.slot(parameter) else {
            return Vec::new();
        };
        let groups = [Some(&unit.groups.shard), unit.groups.replicas.as_ref()];
        let ranks = |group: &ProcessGroup| {
            let members = group.members().iter();
            let ranks = members.filter_map(|member| all.iter().position(|known| known == member));
            ranks.collect::<Vec<_>>()
        };
        let groups = groups.into_iter().flatten();
        let groups = groups.map(|group| (format!("group {}", group.name()), ranks(group)));
        groups
            .filter(|(_, ranks)| ranks.len() < all.len())
            .collect()
    }

    fn path(&self, parameter: usize) -> String {
        let slot = self.slot(parameter);
        slot.map_or_else(String::new, |(unit, slot)| unit.slots[slot].path.clone())
    }

    /// Describes the collectives that carried gradients of the unit, in sequence, and the step's order of operations.
    fn operations(&self, unit: usize) -> String {
        let carried = self.audited.carried.iter();
        let carried = carried.filter(|(of, _)| of.is_none_or(|of| of == unit));
        let carried: Vec<_> = carried.map(|(_, collective)| collective.as_str()).collect();
        let mut text = if carried.is_empty() {
            "no collective carried it".to_owned()
        } else {
            format!(
                "its unit's gradients went through {}",
                carried.join(", then ")
            )
        };
        let order = self.progress.order.schedules.last();
        let operations: Vec<_> = order.operations().collect();
        let ordinals = operations
            .iter()
            .enumerate()
            .filter(|(_, operation)| **operation == Operation::Reduce(unit));
        let ordinals: Vec<_> = ordinals
            .map(|(ordinal, _)| (ordinal + 1).to_string())
            .collect();
        let shown = operations
            .iter()
            .take(MOST_OPERATIONS)
            .map(Operation::to_string);
        let shown = shown.collect::<Vec<_>>().join(", ");
        let more = if operations.len() > MOST_OPERATIONS {
            ", .."
        } else {
            ""
        };
        let _ = write!(
            text,
            "; the order has {} operations, with its reduction as number {}: {shown}{more}",
            operations.len(),
            if ordinals.is_empty() {
                "none".to_owned()
            } else {
                ordinals.join(" and ")
            },
        );
        text
    }

    fn error(&self, fault: &Fault) -> Error {
        let (unit, _) = self.audited.owner(fault.parameter);
        let label = self.slot(fault.parameter).map(|(unit, _)| unit.label());
        let factors = self
            .slot(fault.parameter)
            .and_then(|(unit, _)| unit.factors());
        let divided = match factors {
            None => format!("divided by {}", self.root.group.size()),
            Some(DivideFactors { pre, post }) => format!("divided by {pre} and {post}"),
        };
        Error::Audit {
            rank: self.root.group.rank(),
            unit: label.unwrap_or_default(),
            path: self.path(fault.parameter),
            expected: format!("{}, each once, {divided} once", fault.expected).into(),
            got: fault
                .finding
                .describe(|parameter| self.path(parameter))
                .into(),
            operations: self.operations(unit).into(),
        }
    }
}

/// Returns the factor by which the policy multiplies a sum over `ranks` ranks.
fn scale(factors: Option<DivideFactors>, ranks: usize) -> Tag {
    match factors {
        None => Tag::from(field::inverse(ranks as u64)),
        Some(DivideFactors { pre, post }) => {
            let [pre, post] = [pre, post].map(|factor| Tag::from(field::of_number(1.0 / factor)));
            pre.times(post)
        }
    }
}

impl Root {
    /// Tells the auditor that the reduced gradients of these leaves were passed to Burn.
    pub(crate) fn handed_over(&self, leaves: &[NodeId]) {
        self.progress().audited.handed_over(leaves);
    }

    /// Ends the step's audit after the last gradient was passed to Burn. In an audited step, this compares the reduced
    /// gradients with the gradients computed on all ranks.
    pub(crate) fn end_audit(&self) -> Result<(), Error> {
        self.step(|progress| {
            let mut audited = std::mem::take(&mut progress.audited);
            let mut auditor =
                std::mem::replace(&mut audited.auditor, Auditor::new(Audit::Off, 0, 0));
            let at_end = AtEnd {
                root: self,
                audited: &audited,
                copies: (0..audited.first.len() - 1)
                    .map(|unit| self.copies(unit))
                    .collect(),
                progress,
            };
            let fault = auditor.fault(
                |parameter| at_end.groups(parameter),
                |parameter| at_end.wanted(parameter),
            );
            let error = fault.map(|fault| at_end.error(&fault));
            auditor.end_step(|parameter| at_end.is_reduced(parameter));
            audited.auditor = auditor;
            audited.end();
            progress.reductions.accounts.clear();
            progress.audited = audited;
            error.map_or(Ok(()), Err)
        })
    }

    /// Returns the number of backwards whose audit completed and passed.
    pub(crate) fn num_audited(&self) -> u64 {
        self.progress().audited.auditor.num_audited()
    }
}

impl Progress {
    /// Decides whether the new step is audited. The decision is the same on all ranks, because it depends only on the
    /// switches and the order.
    pub(super) fn begin_audit(&mut self, root: &Root) {
        let order = self.order.schedules.last();
        let is_at_start = order.is_untouched();
        self.audited
            .auditor
            .begin(is_at_start, || root.switches(), || order.hash());
    }
}
