//! Reductions of a hook that are in progress.

use burn::tensor::Tensor;
use burn_fsdp_collectives::Account;

use super::accumulate::Sum;
use crate::audit::Tag;
use crate::convert::cast;
use crate::copies::Generation;
use crate::error::Error;
use crate::hooks::PendingTensors;
use crate::seal;

/// A reduction by a hook, in progress.
pub(super) struct ByHook {
    /// This rank's part of each sum, for the gradients that any rank has.
    pub(super) parts: PendingTensors,
    /// The tag of each sum; `None` for gradients that no rank has.
    pub(super) tags: Vec<Option<Tag>>,
    /// The memory of the gradients, which is counted until they are reduced.
    pub(super) accounts: Vec<Account>,
}

impl ByHook {
    /// Waits for the sums. Returns this rank's part of each for `leaves`, and `None` for gradients that no rank has.
    pub(super) fn sums<'a>(
        self,
        leaves: impl Iterator<Item = (&'a Generation, usize)>,
    ) -> Result<Vec<Option<Sum>>, Error> {
        let mut parts = self.parts.wait()?.into_iter();
        drop(self.accounts);
        let sums = leaves.zip(self.tags).map(|((generation, slot), tag)| {
            let (tag, part) = tag.and_then(|tag| Some((tag, parts.next()?)))?;
            let tensor = as_held(generation, slot, part);
            let group = &generation.unit.groups.shard;
            Some(Sum {
                seal: seal::seal(group, &tensor),
                tensor,
                tag,
            })
        });
        Ok(sums.collect())
    }
}

/// Returns a result of the hook in the type and on the device of the shard.
fn as_held(generation: &Generation, index: usize, part: Tensor<1>) -> Tensor<1> {
    let unit = &generation.unit;
    let part = cast(part, unit.slots[index].elements.stored.dtype);
    let home = generation.home(index);
    if part.device() == home {
        return part;
    }
    unit.staging.moved(part, &home)
}
