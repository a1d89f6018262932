//! A module copy's reference to a parameter, and the link to the root of its unit.

use std::sync::{Arc, Weak};

use burn::tensor::Tensor;
use burn_fsdp_collectives::Fingerprint;
use parking_lot::Mutex;

use crate::ambient::{Purpose, is_within, within};
use crate::copies::{Copied, Copies, Generation, Transition};
use crate::error::Error;
use crate::root::{Place, Root};

/// A module's reference to one parameter of a generation. It is counted, because backward graphs also hold generations
/// and must not make an abandoned copy look alive.
pub(crate) struct Owned {
    generation: Arc<Generation>,
    pub(crate) slot: usize,
    copy: Copied,
    clones: Arc<Clones>,
    /// False for a reference that a graph holds.
    is_counted: bool,
    root_link: Arc<RootLink>,
}

/// The copies made of one parameter in one copy of the module: their number, and the last one.
#[derive(Default)]
pub(crate) struct Clones(Mutex<(u64, Option<LastClone>)>);

/// A copy of the module, and the copies made of it.
type LastClone = (Copied, Weak<Clones>);

impl Clones {
    /// Returns the number of copies made.
    pub(super) fn count(&self) -> u64 {
        self.0.lock().0
    }

    /// Returns the last copy made, if any part of it still exists.
    pub(super) fn last(&self) -> Option<(Copied, Arc<Self>)> {
        let last = self.0.lock().1.clone();
        last.and_then(|(copy, clones)| Some((copy, clones.upgrade()?)))
    }

    /// Creates the next copy of `copy`. Parameters of one module are copied together, so they get the same number.
    fn add(&self, copy: Copied) -> (Copied, Arc<Self>) {
        let mut made = self.0.lock();
        let next = Copied {
            number: Fingerprint::of(&(copy.number, made.0)),
            parent: copy.number,
        };
        let clones = Arc::<Self>::default();
        *made = (made.0 + 1, Some((next, Arc::downgrade(&clones))));
        (next, clones)
    }
}

/// The root that orders a unit's operations. It changes when the unit's module becomes part of a larger one.
#[derive(Default)]
pub(crate) struct RootLink(Mutex<Option<Arc<Root>>>);

impl RootLink {
    /// Moves the unit below `root`.
    pub(crate) fn join(&self, root: &Arc<Root>) {
        *self.0.lock() = Some(root.clone());
    }

    /// Returns the root, if there is one yet.
    pub(crate) fn root(&self) -> Option<Arc<Root>> {
        self.0.lock().clone()
    }
}

impl Owned {
    /// Returns a counted reference in the original copy of the module.
    pub(crate) fn new(generation: Arc<Generation>, slot: usize, root_link: Arc<RootLink>) -> Self {
        Self::of(
            generation,
            slot,
            (Copied::default(), Arc::default()),
            root_link,
        )
    }

    /// Returns an uncounted reference in copy `copy` of the module.
    pub(super) fn uncounted(
        generation: Arc<Generation>,
        slot: usize,
        copy: Copied,
        root_link: Arc<RootLink>,
    ) -> Self {
        let copy = (copy, Arc::default());
        within(Purpose::CopyForGraph, || {
            Self::of(generation, slot, copy, root_link)
        })
    }

    fn of(
        generation: Arc<Generation>,
        slot: usize,
        (copy, clones): (Copied, Arc<Clones>),
        root_link: Arc<RootLink>,
    ) -> Self {
        let is_counted = !is_within(Purpose::CopyForGraph);
        if is_counted {
            generation.holders.take_hold(copy.number, slot);
        }
        Self {
            generation,
            slot,
            copy,
            clones,
            is_counted,
            root_link,
        }
    }

    /// Returns the reference to the same parameter in `generation`, after `transition`.
    pub(crate) fn moved_to(&self, generation: Arc<Generation>, transition: Transition) -> Self {
        let copy = match transition {
            // The module that was passed to `valid` still exists, so this is another copy.
            Transition::Valid => self.clones.add(self.copy),
            Transition::Map | Transition::Train | Transition::Device => {
                (self.copy, self.clones.clone())
            }
        };
        Self::of(generation, self.slot, copy, self.root_link.clone())
    }

    pub(super) fn clones(&self) -> &Arc<Clones> {
        &self.clones
    }

    /// Returns the module copy to which the parameter belongs.
    pub(crate) fn copy(&self) -> Copied {
        self.copy
    }

    pub(crate) fn root_link(&self) -> &Arc<RootLink> {
        &self.root_link
    }

    /// Returns the full parameter as a function of `parent`, in the form that the model's code sees. Collective.
    pub(crate) fn full<const D: usize>(&self, parent: Tensor<1>) -> Result<Tensor<D>, Error> {
        let root = self.root_link.root();
        let place = Place::own(self.slot);
        root.expect("a sharded module has a root")
            .access(&self.values(), place, self.copy, parent)
    }

    /// Returns all values of the unit in this copy of the module.
    pub(crate) fn values(&self) -> Arc<Generation> {
        if self.generation.holders.is_all_of(self.copy.number) {
            return self.generation.clone();
        }
        Copies::of(&self.generation).values_of(self.copy.number, Some(&self.generation))
    }
}

impl Clone for Owned {
    fn clone(&self) -> Self {
        let copy = if is_within(Purpose::CopyForGraph) {
            // The copy for a recomputed region counts as the same copy.
            (self.copy, Arc::default())
        } else {
            self.clones.add(self.copy)
        };
        Self::of(
            self.generation.clone(),
            self.slot,
            copy,
            self.root_link.clone(),
        )
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.is_counted {
            return;
        }
        self.generation.holders.let_go(self.copy.number, self.slot);
        if !self.generation.holders.is_held()
            && let Some(root) = self.root_link.root()
        {
            root.forget(&self.generation, self.copy);
        }
    }
}

impl std::ops::Deref for Owned {
    type Target = Arc<Generation>;

    fn deref(&self) -> &Self::Target {
        &self.generation
    }
}
