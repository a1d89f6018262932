//! Which copy of a module holds a parameter.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ambient::{Purpose, is_within};
use crate::generation::{Generation, Transition};

/// A copy of a module: it keeps its number whatever is done to its parameters, all or some, and a
/// clone gets another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Copied {
    /// Equal for all parameters of one copy.
    pub(crate) number: u64,
    /// That of the copy that it was cloned from.
    pub(crate) parent: u64,
}

/// A module's hold on one parameter of a generation: counted, because backward graphs hold
/// generations too, and must not make an abandoned copy look alive.
pub(crate) struct Owned {
    generation: Arc<Generation>,
    /// Which parameter.
    pub(crate) slot: usize,
    copy: Copied,
    /// How many copies were made of it.
    num_clones: AtomicU64,
    /// Not what a graph holds.
    is_counted: bool,
}

impl Owned {
    /// Takes hold, in the copy of the module that was sharded.
    pub(crate) fn new(generation: Arc<Generation>, slot: usize) -> Self {
        Self::of(generation, slot, Copied::default(), 0)
    }

    fn of(generation: Arc<Generation>, slot: usize, copy: Copied, num_clones: u64) -> Self {
        let is_counted = !is_within(Purpose::CopyForGraph);
        if is_counted {
            generation.take_hold(copy.number, slot);
        }
        Self {
            generation,
            slot,
            copy,
            num_clones: AtomicU64::new(num_clones),
            is_counted,
        }
    }

    /// The hold on what `transition` made of the parameter, in `generation`.
    pub(crate) fn moved_to(&self, generation: Arc<Generation>, transition: Transition) -> Self {
        match transition {
            // The module that it is made of stays.
            Transition::Valid => Self::of(generation, self.slot, self.cloned(), 0),
            Transition::Map | Transition::Train | Transition::Device => Self::of(
                generation,
                self.slot,
                self.copy,
                self.num_clones.load(Ordering::Relaxed),
            ),
        }
    }

    /// A copy of its own. Parameters of one module are copied together, so they get one number.
    fn cloned(&self) -> Copied {
        let ordinal = self.num_clones.fetch_add(1, Ordering::Relaxed);
        let mut hasher = DefaultHasher::new();
        (self.copy.number, ordinal).hash(&mut hasher);
        Copied {
            number: hasher.finish(),
            parent: self.copy.number,
        }
    }

    /// The copy of the module that it belongs to.
    pub(crate) fn copy(&self) -> Copied {
        self.copy
    }

    /// All values of the unit in this copy of the module.
    pub(crate) fn values(&self) -> Arc<Generation> {
        if self.generation.is_all_of(self.copy.number) {
            return self.generation.clone();
        }
        self.unit
            .values_of(self.copy.number, Some(&self.generation))
    }
}

impl Clone for Owned {
    fn clone(&self) -> Self {
        let copy = if is_within(Purpose::CopyForGraph) {
            // A checkpointed region's module is a part of the one around it.
            self.copy
        } else {
            self.cloned()
        };
        Self::of(self.generation.clone(), self.slot, copy, 0)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !self.is_counted {
            return;
        }
        self.generation.let_go(self.copy.number, self.slot);
        if !self.generation.is_held()
            && let Some(root) = self.generation.unit.root()
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
