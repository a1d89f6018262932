//! The ids that optimizers, gradients and groups use for a sharded parameter.
//!
//! Burn sees a sharded parameter as two: the stand-in in the module's field, and the shard next to it. They must not
//! share an id, because an optimizer takes an id's gradient at the first parameter with it. The shard has the id that
//! the parameter had before sharding, so existing groups still match, and the optimizer keeps its state under it. The
//! stand-in has the [`counterpart`] of that id, which records contain.
//!
//! Loading a record gives the stand-in the id in the record, which Burn does not show to the shard: the shard's id is
//! then *unsettled*. The engine's next walk over the module, at the latest in [`backward`](crate::backward), sees both
//! and gives the shard the counterpart of the loaded id. For a record of a sharded module, this is the id of the
//! recorded shard, so the optimizer state recorded under it is found.

use std::sync::Arc;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use burn::module::ParamId;

/// The bits in which the ids of a stand-in and its shard differ.
const COUNTERPART: u64 = 0x5be0_cd19_137e_2179;
/// The bits in which an unsettled id differs from the shard's previous id.
const UNSETTLED: u64 = 0x1f83_d9ab_fb41_bd6b;

/// Returns the stand-in's id for a shard's id, and vice versa.
pub(crate) fn counterpart(id: ParamId) -> ParamId {
    ParamId::from(id.val() ^ COUNTERPART)
}

/// The id of a shard, shared by all its clones.
#[derive(Debug, Clone)]
pub(crate) struct Identity(Arc<Cell>);

#[derive(Debug)]
struct Cell {
    id: AtomicU64,
    is_settled: AtomicBool,
}

impl Identity {
    pub(crate) fn new(id: ParamId) -> Self {
        Self::with(id, true)
    }

    fn with(id: ParamId, is_settled: bool) -> Self {
        Self(Arc::new(Cell {
            id: AtomicU64::new(id.val()),
            is_settled: AtomicBool::new(is_settled),
        }))
    }

    /// Returns the identity of a shard whose stand-in has just received a new id from a record.
    pub(crate) fn unsettled(&self) -> Self {
        if self.is_settled() {
            Self::with(ParamId::from(self.id().val() ^ UNSETTLED), false)
        } else {
            self.clone()
        }
    }

    /// Returns the id, which may be unsettled.
    pub(crate) fn id(&self) -> ParamId {
        ParamId::from(self.0.id.load(Ordering::Relaxed))
    }

    /// Settles the id from the stand-in's id if it is unsettled, and returns it.
    pub(crate) fn settle(&self, stand_in: ParamId) -> ParamId {
        if !self.is_settled() {
            let id = counterpart(stand_in);
            self.0.id.store(id.val(), Ordering::Relaxed);
            self.0.is_settled.store(true, Ordering::Relaxed);
        }
        self.id()
    }

    fn is_settled(&self) -> bool {
        self.0.is_settled.load(Ordering::Relaxed)
    }

    /// Returns the id for one of Burn's own walks. Warns once if the id is unsettled, because the walk would not find
    /// state loaded with a record.
    pub(crate) fn shown(&self, path: &str) -> ParamId {
        static WARNED: Once = Once::new();
        if !self.is_settled() {
            WARNED.call_once(|| {
                crate::report::warn(format!(
                    "a record was loaded into `{path}` after sharding, and Burn asks for its id before the engine has \
                     seen it, so optimizer state recorded with it and groups of ids will not match; call \
                     `settle_ids(&model)` after `load_record`"
                ));
            });
        }
        self.id()
    }
}

#[cfg(test)]
mod tests {
    use burn::module::ParamId;

    use super::{Identity, counterpart};

    #[test]
    fn the_counterpart_of_an_id_is_an_involution() {
        let id = ParamId::new();
        assert_ne!(counterpart(id), id);
        assert_eq!(counterpart(counterpart(id)), id);
    }

    #[test]
    fn unsettled_ids_do_not_clash_with_recorded_ids() {
        let id = ParamId::new();
        let identity = Identity::new(id).unsettled();
        assert_ne!(identity.id(), id);
        assert_ne!(identity.id(), counterpart(id));
        // A record from before sharding has the shard's own id.
        let clone = identity.clone();
        assert_eq!(identity.settle(id), counterpart(id));
        assert_eq!(clone.id(), counterpart(id));
        // An identity is settled only once.
        assert_eq!(identity.settle(ParamId::new()), counterpart(id));
    }
}
