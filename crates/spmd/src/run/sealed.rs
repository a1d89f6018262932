//! The seals of an executor's values.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_flex::FlexTensor;
use burn_fsdp_collectives::{Label, ProcessGroup, Seal};
use burn_ir::TensorId;

use crate::error::Error;

/// A seal, and a description of its value.
#[derive(Debug, Clone)]
pub(super) struct Sealed {
    pub(super) seal: Seal,
    pub(super) what: Label,
}

/// The seals of the current values, if ranks compare bytes.
#[derive(Debug, Default)]
pub(super) struct Seals {
    pub(super) of: BTreeMap<TensorId, Sealed>,
    /// Seals of values that replace others at the end of this run; `None` until a node has written the value.
    pub(super) fresh: BTreeMap<TensorId, Option<Seal>>,
    /// Number of steps that have been sealed.
    pub(super) steps: u64,
}

/// The seal of a value that a node consumes and returns as a view, and the address and length of its memory.
pub(super) struct Carried {
    pub(super) sealed: Sealed,
    pub(super) memory: (usize, usize),
}

impl Seals {
    pub(super) fn get(&self, id: TensorId) -> Option<&Sealed> {
        self.of.get(&id)
    }

    pub(super) fn remove(&mut self, id: TensorId) {
        self.of.remove(&id);
    }
}

impl Sealed {
    /// Checks that a value still matches its seal. Errors name `node`.
    pub(super) fn check(
        &self,
        group: &ProcessGroup,
        node: usize,
        tensor: &FlexTensor,
    ) -> Result<(), Error> {
        let what = || self.what.as_str().to_owned();
        let looked = group.check_seal(&self.seal, tensor.bytes(), what);
        looked.map_err(|source| Error::Collective {
            node,
            source: Arc::new(source),
        })
    }
}
