//! The hold of a module's copy on a parameter, and the link to the root of its unit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;
use burn_fsdp_collectives::Fingerprint;
use parking_lot::Mutex;

use crate::ambient::{Purpose, is_within};
use crate::copies::{Copied, Copies, Generation, Transition};
use crate::error::Error;
use crate::root::Root;

/// A module's hold on one parameter of a generation: counted, because backward graphs hold
/// generations too, and must not make an abandoned copy look alive.
pub(crate) struct Owned {
    generation: Arc<Generation>,
    /// Index of the parameter in its unit.
    pub(crate) slot: usize,
    copy: Copied,
    /// Number of copies that were made of it.
    num_clones: AtomicU64,
    /// False if a graph holds it.
    is_counted: bool,
    root_link: Arc<RootLink>,
}

/// The root that orders a unit's operations: another one, once its module is a part of a larger one.
#[derive(Default)]
pub(crate) struct RootLink(Mutex<Option<Arc<Root>>>);

impl RootLink {
    /// Moves the unit below `root`.
    pub(crate) fn join(&self, root: &Arc<Root>) {
        *self.0.lock() = Some(root.clone());
    }

    /// Returns the root, once there is one.
    pub(crate) fn root(&self) -> Option<Arc<Root>> {
        self.0.lock().clone()
    }
}

impl Owned {
    /// Takes hold, in the copy of the module that was sharded.
    pub(crate) fn new(generation: Arc<Generation>, slot: usize, root_link: Arc<RootLink>) -> Self {
        Self::of(generation, slot, Copied::default(), 0, root_link)
    }

    fn of(
        generation: Arc<Generation>,
        slot: usize,
        copy: Copied,
        num_clones: u64,
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
            num_clones: AtomicU64::new(num_clones),
            is_counted,
            root_link,
        }
    }

    /// Returns the hold on what `transition` made of the parameter, in `generation`.
    pub(crate) fn moved_to(&self, generation: Arc<Generation>, transition: Transition) -> Self {
        match transition {
            // The module that it is made of stays.
            Transition::Valid => Self::of(
                generation,
                self.slot,
                self.cloned(),
                0,
                self.root_link.clone(),
            ),
            Transition::Map | Transition::Train | Transition::Device => Self::of(
                generation,
                self.slot,
                self.copy,
                self.num_clones.load(Ordering::Relaxed),
                self.root_link.clone(),
            ),
        }
    }

    /// Returns a new copy. Parameters of one module are copied together, so they get one number.
    fn cloned(&self) -> Copied {
        let ordinal = self.num_clones.fetch_add(1, Ordering::Relaxed);
        Copied {
            number: Fingerprint::of(&(self.copy.number, ordinal)),
            parent: self.copy.number,
        }
    }

    /// Returns the copy of the module that it belongs to.
    pub(crate) fn copy(&self) -> Copied {
        self.copy
    }

    /// Returns the link to the unit's root.
    pub(crate) fn root_link(&self) -> &Arc<RootLink> {
        &self.root_link
    }

    /// Returns the full parameter, as the model's own code gets it, as a function of `parent`. Collective.
    pub(crate) fn full<const D: usize>(&self, parent: Tensor<1>) -> Result<Tensor<D>, Error> {
        let root = self.root_link.root();
        root.expect("a sharded module has a root").access(
            &self.values(),
            self.slot,
            self.copy,
            parent,
        )
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
            // A recomputed region's module is a part of the one around it.
            self.copy
        } else {
            self.cloned()
        };
        Self::of(
            self.generation.clone(),
            self.slot,
            copy,
            0,
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
