//! The seals of an executor's values.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_flex::FlexTensor;
use burn_fsdp_collectives::{Keeper, Label, ProcessGroup, RestKind, Seal, Sealed};
use burn_ir::TensorId;

use crate::error::Error;

/// The seals of the current values, if ranks compare bytes.
#[derive(Debug)]
pub(super) struct Seals {
    keeper: Keeper,
    /// Seals of values that replace others at the end of this run; `None` until a node has written the value.
    pub(super) fresh: BTreeMap<TensorId, Option<Seal>>,
    /// Number of steps that have been sealed.
    pub(super) steps: u64,
}

/// The seal of a value that a node consumes and returns as a view, and the address and length of its memory.
pub(super) struct CarriedSeal {
    pub(super) sealed: Arc<Sealed>,
    pub(super) memory: (usize, usize),
}

impl Seals {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self {
            keeper: group.keeper(),
            fresh: BTreeMap::new(),
            steps: 0,
        }
    }

    pub(super) fn get(&self, id: TensorId) -> Option<Arc<Sealed>> {
        self.keeper.get((id.value(), RestKind::Value))
    }

    pub(super) fn set(&self, id: TensorId, sealed: Option<Arc<Sealed>>) {
        self.keeper.set((id.value(), RestKind::Value), sealed);
    }

    pub(super) fn keep(&self, id: TensorId, seal: Seal, what: Label) {
        self.set(id, Some(Arc::new(Sealed { seal, what })));
    }

    pub(super) fn remove(&self, id: TensorId) {
        self.set(id, None);
    }

    /// Removes the seals of values that are gone.
    pub(super) fn retain(&self, is_present: impl Fn(TensorId) -> bool) {
        self.keeper.retain(|(id, _)| is_present(TensorId::new(id)));
    }
}

/// Checks that a value still matches its seal. Errors name `node`.
pub(super) fn check(
    sealed: &Sealed,
    group: &ProcessGroup,
    node: usize,
    tensor: &FlexTensor,
) -> Result<(), Error> {
    let looked = group.check_sealed(sealed, tensor.bytes());
    looked.map_err(|source| Error::Collective {
        node,
        source: Arc::new(source),
    })
}
