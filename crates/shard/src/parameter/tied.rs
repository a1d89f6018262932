//! Another field that shares a sharded parameter.
//!
//! Burn represents shared parameters as clones of one parameter, with one id. The first such field of the module is
//! sharded, and every other one has a [`TiedParam`] in its place. It holds no value, and returns the first field's
//! value in the same copy of the module. So there is only one shard and one gradient, and a pass over the module
//! changes all fields through the first.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;

use super::mailbox;
use super::member;
use super::owned::{Clones, Owned, RootLink};
use crate::ambient::{Purpose, is_within};
use crate::copies::{Copied, Copies, Generation};
use crate::error::Error;
use crate::layer::Layer;
use crate::root::Place;
use crate::thrown::throw;

/// The error message for a field that was copied or kept without the first field.
const ALONE: &str =
    "but this copy of the module has only the second; clone and keep the module that has both";
/// The error message for a record with both values.
const RECORDED_TWICE: &str =
    "but a record has different values for them; load a record in which they are equal";

/// The part of a tied field that is the same in all copies of the module.
pub(crate) struct Tie {
    pub(crate) copies: Copies,
    pub(crate) slot: usize,
    /// Number of the field among the fields that share the parameter; 0 for the first.
    pub(crate) field: usize,
    pub(crate) path: String,
    /// The layer around the field, if the layer does not compute in the parameter's type.
    pub(crate) unfit: Option<Arc<Layer>>,
    pub(crate) root_link: Arc<RootLink>,
}

/// A field that shares a sharded parameter.
pub(crate) struct TiedParam {
    tie: Arc<Tie>,
    /// The copy of the module that it belongs to; `None` if it was created without the first field.
    copy: Option<Held>,
    /// The values for a backward graph, which may need them after the module is dropped.
    of_graph: Option<Arc<Generation>>,
}

/// The first field's copy of the module, as this field last saw it.
struct Held {
    copy: Copied,
    /// The copies made of the first field.
    clones: Arc<Clones>,
    /// The number of copies when this field was last copied.
    num_seen: AtomicU64,
}

impl Held {
    fn new((copy, clones): (Copied, Arc<Clones>)) -> Self {
        Self {
            copy,
            num_seen: AtomicU64::new(clones.count()),
            clones,
        }
    }

    /// Returns the latest copy of the first field, if it is newer than this field. The first field is always copied
    /// first, because fields are copied in module order.
    fn followed(&self) -> Option<Self> {
        let count = self.clones.count();
        let is_new = self.num_seen.swap(count, Ordering::Relaxed) != count;
        is_new.then(|| self.clones.last()).flatten().map(Self::new)
    }
}

impl std::fmt::Debug for TiedParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TiedParam")
            .field("path", &self.tie.path)
            .field("to", &self.tie.first())
            .finish_non_exhaustive()
    }
}

impl Tie {
    /// Returns the path of the first field.
    fn first(&self) -> String {
        self.copies.unit.slots[self.slot].path.clone()
    }

    fn refused(&self, problem: &'static str) -> Error {
        Error::Tied {
            first: self.first(),
            second: self.path.clone(),
            problem,
        }
    }
}

impl TiedParam {
    /// Returns a tied field in the original copy of the module; `clones` are the first field's copies.
    pub(crate) fn new(tie: Tie, clones: Arc<Clones>) -> Self {
        Self {
            tie: Arc::new(tie),
            copy: Some(Held::new((Copied::default(), clones))),
            of_graph: None,
        }
    }

    /// Returns the full parameter of the first field in the same copy, in the form that the model's code sees.
    /// Collective.
    pub(super) fn full<const D: usize>(&self) -> Result<Tensor<D>, Error> {
        let (copy, values) = self.values()?;
        let Tie { slot, field, .. } = *self.tie;
        if let Some(layer) = &self.tie.unfit {
            let compute = values.unit.slots[slot].elements.compute.dtype;
            return Err(layer.refuses(&self.tie.path, compute));
        }
        let root = self.tie.root_link.root();
        let parent = values.own_leaf(slot);
        let place = Place { slot, field };
        root.expect("a sharded module has a root")
            .access(&values, place, copy, parent)
    }

    /// Returns the copy of the module that this field belongs to, and the unit's values in it.
    fn values(&self) -> Result<(Copied, Arc<Generation>), Error> {
        let held = self.copy.as_ref().and_then(|held| {
            let values = self.tie.copies.held_by(held.copy.number, self.tie.slot);
            let values = values.or_else(|| self.of_graph.clone())?;
            Some((held.copy, values))
        });
        held.ok_or_else(|| self.tie.refused(ALONE))
    }

    /// Adds the field to the members that one of the engine's walks collects; other walks do not see it.
    pub(super) fn answer(&self) {
        if !is_within(Purpose::Inspect) {
            // The whole value has just been recorded under the field's own path.
            mailbox::take_recorded(&self.tie.copies.unit, self.tie.slot);
            return;
        }
        let (copy, values) = self.values().unwrap_or_else(|error| throw(error));
        let root_link = self.tie.root_link.clone();
        let owned = Owned::uncounted(values, self.tie.slot, copy, root_link);
        member::answer_tied(owned);
    }

    /// Returns the field after a map. Rejects a record's value for this field if it differs from the first field's.
    pub(super) fn compared(self) -> Self {
        if is_within(Purpose::Prepare) {
            return self;
        }
        let Some((loaded, _)) = mailbox::take_value(&self.tie.copies.unit, self.tie.slot) else {
            return self;
        };
        let (_, values) = self.values().unwrap_or_else(|error| throw(error));
        let loaded = values.unit.held_form(self.tie.slot, loaded);
        let loaded = loaded.unwrap_or_else(|error| throw(error)).into_data();
        let held = values.raw(self.tie.slot).into_data();
        if (held.dtype(), held.as_bytes()) != (loaded.dtype(), loaded.as_bytes()) {
            throw(self.tie.refused(RECORDED_TWICE));
        }
        self
    }
}

impl Clone for TiedParam {
    fn clone(&self) -> Self {
        let (copy, of_graph) = if is_within(Purpose::CopyForGraph) {
            // The copy for a recomputed region counts as the same copy.
            let same = |held: &Held| Held::new((held.copy, held.clones.clone()));
            let values = self.values().ok().map(|(_, values)| values);
            (self.copy.as_ref().map(same), values)
        } else {
            (self.copy.as_ref().and_then(Held::followed), None)
        };
        Self {
            tie: self.tie.clone(),
            copy,
            of_graph,
        }
    }
}
