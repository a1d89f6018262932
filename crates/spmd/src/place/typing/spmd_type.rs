//! The types of values on one mesh axis, and the effect of collectives on them.

use std::fmt;

use burn_fsdp_mesh::{Placement, ReduceOp};

use crate::graph::CollectiveKind;

/// The type of a value on one mesh axis: what each rank holds. It determines the type of the gradient:
///
/// | type | the ranks hold | the complete gradient | part of the gradient from a use on parts, or on own rows |
/// |---|---|---|---|
/// | replicate | the same | replicate | an addend on each rank: partial(sum), or varying |
/// | shard | parts of one whole | shard | a part: shard |
/// | partial | addends of one whole | replicate: a sum hands its gradient to every addend | replicate |
/// | varying | values of their own rows | varying | varying |
/// | owned(r) | all of it on the rank at index r, nothing on the others | owned(r) | only its owner uses it |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpmdType {
    /// All ranks hold the same value.
    Replicate,
    /// Every rank holds a part of one value.
    Shard,
    /// Every rank holds an addend of one value.
    Partial(ReduceOp),
    /// Every rank holds a different value, computed from its own rows of the batch. The values are not parts of one
    /// whole.
    Varying,
    /// The rank at this index holds the whole value. The others hold nothing, and skip the nodes that read or write it.
    Owned(usize),
}

impl From<Placement> for SpmdType {
    fn from(placement: Placement) -> Self {
        match placement {
            Placement::Replicate => Self::Replicate,
            Placement::Shard(_) => Self::Shard,
            Placement::Partial(op) => Self::Partial(op),
        }
    }
}

/// Prints as `replicate`, `shard`, `partial(sum)`, `varying` or `owned(1)`.
impl fmt::Display for SpmdType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("replicate"),
            Self::Shard => f.write_str("shard"),
            Self::Partial(op) => write!(f, "partial({op})"),
            Self::Varying => f.write_str("varying"),
            Self::Owned(owner) => write!(f, "owned({owner})"),
        }
    }
}

impl SpmdType {
    /// Returns the type of a placement. If there is an owner, a sharded value is entirely on that rank.
    pub(super) fn of_placement(placement: Placement, owner: Option<usize>) -> Self {
        match (placement, owner) {
            (Placement::Shard(_), Some(owner)) => Self::Owned(owner),
            _ => placement.into(),
        }
    }

    /// Returns the owner's index; `None` if the value is not owned by one rank.
    pub(super) fn owner(self) -> Option<usize> {
        match self {
            Self::Owned(owner) => Some(owner),
            _ => None,
        }
    }

    /// Returns a placement of this type; `None` for varying values. An owned value counts as sharded.
    pub(super) fn to_placement(self) -> Option<Placement> {
        match self {
            Self::Replicate => Some(Placement::Replicate),
            Self::Shard | Self::Owned(_) => Some(Placement::Shard(0)),
            Self::Partial(op) => Some(Placement::Partial(op)),
            Self::Varying => None,
        }
    }

    /// Returns the type of the complete gradient of a value of this type: the same type, or for addends the type of
    /// their sum.
    pub(crate) fn of_gradient(self) -> Self {
        match self {
            Self::Replicate | Self::Shard | Self::Varying | Self::Owned(_) => self,
            Self::Partial(_) => Self::Replicate,
        }
    }

    /// Returns true if a value of type `other` is accepted where this type is expected.
    pub(crate) fn takes(self, other: Self) -> bool {
        // A value that is the same on all ranks is also a value of each rank's own rows.
        self == other || (self == Self::Varying && other == Self::Replicate)
    }

    /// Returns the type of a value after a collective along the axis, or why the collective does not accept the value.
    /// If one rank sends or receives the whole value, it is `owner`.
    pub(crate) fn after(
        self,
        kind: CollectiveKind,
        reduction: Option<ReduceOp>,
        owner: Option<usize>,
    ) -> Result<Self, &'static str> {
        let combined = match kind {
            CollectiveKind::AllReduce => Self::Replicate,
            CollectiveKind::ReduceScatter => owner.map_or(Self::Shard, Self::Owned),
            CollectiveKind::AllGather => {
                return match self {
                    Self::Owned(own) if Some(own) == owner => Ok(Self::Replicate),
                    Self::Owned(_) => Err("it takes it from ranks that hold none of it"),
                    Self::Shard | Self::Varying if owner.is_some() => {
                        Err("it takes all of it from one rank")
                    }
                    Self::Shard | Self::Varying => Ok(Self::Replicate),
                    Self::Replicate => Err("it is already the same on all ranks"),
                    Self::Partial(_) => Err("it concatenates addends"),
                };
            }
            CollectiveKind::AllToAll => {
                return match self {
                    Self::Shard | Self::Varying => Ok(self),
                    Self::Replicate => Err("it is already the same on all ranks"),
                    Self::Partial(_) => Err("it exchanges addends"),
                    Self::Owned(_) => Err("one rank holds all of it"),
                };
            }
        };
        match (self, reduction) {
            (_, None) => Err("it combines without specifying a reduction"),
            (Self::Partial(op), Some(other)) if op == other => Ok(combined),
            (Self::Partial(_), Some(_)) => Err("its addends belong to another reduction"),
            (Self::Varying, Some(_)) => Ok(combined),
            // The mean, maximum and minimum of equal values are that value.
            (Self::Replicate, Some(ReduceOp::Sum)) => {
                Err("it is the same on all ranks, so the sum counts it once for each")
            }
            (Self::Replicate, Some(_)) => Ok(combined),
            (Self::Shard, Some(_)) => Err("it combines parts with different elements"),
            (Self::Owned(_), Some(_)) => Err("one rank holds all of it, and the others none"),
        }
    }

    /// Returns true if a reduction along another axis may come before the reduction that this type still needs.
    pub(crate) fn commutes_with(self, reduction: Option<ReduceOp>) -> bool {
        let is_sum = |op| matches!(op, ReduceOp::Sum | ReduceOp::Mean);
        match (self, reduction) {
            (Self::Partial(own), Some(other)) => own == other || is_sum(own) && is_sum(other),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};

    const SUM: SpmdType = SpmdType::Partial(ReduceOp::Sum);

    /// The gradient of a gather is a reduction, and the gradient of a reduction is a gather.
    #[test]
    fn gradients_swap_gathers_and_reductions() {
        let gathered = SpmdType::Shard.after(AllGather, None, None).unwrap();
        assert_eq!(gathered, SpmdType::Replicate);
        // Each rank's use of a replicated value contributes an addend of the gradient.
        let scattered = SUM.after(ReduceScatter, Some(ReduceOp::Sum), None).unwrap();
        assert_eq!(scattered, SpmdType::Shard.of_gradient());
        let reduced = SUM.after(AllReduce, Some(ReduceOp::Sum), None).unwrap();
        assert_eq!(reduced, SUM.of_gradient());
        assert_eq!(
            SpmdType::Shard.after(AllToAll, None, None),
            Ok(SpmdType::Shard)
        );
    }

    #[test]
    fn values_are_reduced_once_and_by_their_own_reduction() {
        let reduced = SUM.after(AllReduce, Some(ReduceOp::Sum), None).unwrap();
        assert!(reduced.after(AllReduce, Some(ReduceOp::Sum), None).is_err());
        assert!(reduced.after(AllReduce, Some(ReduceOp::Mean), None).is_ok());
        assert!(SUM.after(AllReduce, Some(ReduceOp::Mean), None).is_err());
        assert!(SUM.after(ReduceScatter, None, None).is_err());
        assert!(
            SpmdType::Shard
                .after(AllReduce, Some(ReduceOp::Sum), None)
                .is_err()
        );
        assert!(SUM.after(AllGather, None, None).is_err());
        assert!(!SUM.commutes_with(Some(ReduceOp::Max)));
        assert!(SUM.commutes_with(Some(ReduceOp::Mean)));
    }

    #[test]
    fn owned_values_are_gathered_from_and_reduced_to_their_owner() {
        let mean = Some(ReduceOp::Mean);
        let owned = SpmdType::Varying.after(ReduceScatter, mean, Some(1));
        assert_eq!(owned, Ok(SpmdType::Owned(1)));
        let owned = SpmdType::Owned(1);
        assert_eq!(
            owned.after(AllGather, None, Some(1)),
            Ok(SpmdType::Replicate)
        );
        assert!(owned.after(AllGather, None, Some(0)).is_err());
        assert!(owned.after(AllGather, None, None).is_err());
        assert!(SpmdType::Shard.after(AllGather, None, Some(1)).is_err());
        assert!(owned.after(AllReduce, mean, None).is_err());
        assert!(owned.after(AllToAll, None, None).is_err());
    }
}
