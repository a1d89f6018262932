//! The contract of each collective operation: senders, receivers, and the data between them.
//!
//! Everything else about a kind of operation follows from its contract: the lengths that a call must have, the bytes
//! that an engine moves between ranks, and the traffic that tools count.

use std::ops::Range;

use super::operation::{Extent, OperationKind, Signature};

/// An operation's requirements on its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contract {
    /// The sending ranks, and how much of each tensor they send.
    pub gives: Role,
    /// The receiving ranks, and how much of each tensor they receive.
    pub gets: Role,
    /// True if the ranks' data is combined. Otherwise it is concatenated.
    pub reduces: bool,
}

/// One side of a contract: the senders or the receivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Role {
    /// The ranks on this side.
    pub who: Who,
    /// The share of each tensor that a rank on this side sends or receives.
    pub share: Share,
}

/// A selection of the ranks of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Who {
    /// Every rank of the group.
    All,
    /// Only the root.
    Root,
    /// Every rank but the root.
    Others,
    /// No rank: only labels and notes are sent.
    Nobody,
}

/// The share of each tensor that a rank sends or receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Share {
    /// No elements.
    None,
    /// The rank's shard in the tensor's partition.
    Own,
    /// The rank's shard in the other partition of a tensor that has two.
    Across,
    /// The whole tensor.
    Full,
}

impl OperationKind {
    /// Returns the operation's requirements on its ranks.
    #[inline]
    pub fn contract(self) -> Contract {
        use Share::{Across, Full, Own};
        use Who::{All, Nobody, Others, Root};
        let (gives, gets, reduces) = match self {
            Self::AllGather => ((All, Own), (All, Full), false),
            Self::ReduceScatter => ((All, Full), (All, Own), true),
            Self::AllReduce => ((All, Full), (All, Full), true),
            Self::Broadcast => ((Root, Full), (Others, Full), false),
            Self::Scatter => ((Root, Full), (All, Own), false),
            Self::Gather => ((All, Own), (Root, Full), false),
            Self::AllToAll => ((All, Own), (All, Across), false),
            Self::Barrier | Self::Exchange => ((Nobody, Share::None), (Nobody, Share::None), false),
        };
        let role = |(who, share)| Role { who, share };
        let [gives, gets] = [gives, gets].map(role);
        Contract {
            gives,
            gets,
            reduces,
        }
    }
}

impl Role {
    /// Returns the share that `rank` sends or receives in an operation with this root.
    #[inline]
    pub fn share_of(self, rank: usize, root: Option<usize>) -> Share {
        let is_meant = match self.who {
            Who::All => true,
            Who::Root => root == Some(rank),
            Who::Others => root != Some(rank),
            Who::Nobody => false,
        };
        if is_meant { self.share } else { Share::None }
    }
}

impl Extent {
    /// Returns the number of elements in a rank's share.
    #[inline]
    pub fn share_len(&self, share: Share, rank: usize) -> usize {
        let all = |partition: burn_fsdp_mesh::Partition| partition.num_elements();
        match share {
            Share::None => 0,
            Share::Own => self.partition.len(rank) * self.across.map_or(1, all),
            Share::Across => all(self.partition) * self.across.map_or(1, |across| across.len(rank)),
            Share::Full => self.num_elements(),
        }
    }

    /// Returns the elements that rank `from` sends to rank `to`, as a range of the elements that `from` sends.
    fn given(&self, contract: &Contract, from: usize, to: usize) -> Range<usize> {
        match (contract.gives.share, contract.gets.share, self.across) {
            (Share::Own, Share::Across, Some(across)) => {
                scaled(across.range(to), self.partition.len(from))
            }
            (Share::Full, Share::Own, _) => self.partition.range(to),
            // Combined slice by slice; the slices are concatenated afterwards.
            (Share::Full, Share::Full, _) if contract.reduces => self.partition.range(to),
            (share, ..) => 0..self.share_len(share, from),
        }
    }

    /// Returns the elements that rank `from` sends to rank `to`, as a range of the elements that `to` receives.
    fn placed(&self, contract: &Contract, from: usize, to: usize) -> Range<usize> {
        match (contract.gives.share, contract.gets.share, self.across) {
            (Share::Own, Share::Across, Some(across)) => {
                scaled(self.partition.range(from), across.len(to))
            }
            (Share::Own, Share::Full, _) => self.partition.range(from),
            (_, share, _) => 0..self.share_len(share, to),
        }
    }
}

fn scaled(range: Range<usize>, by: usize) -> Range<usize> {
    range.start * by..range.end * by
}

/// The bytes of one part that one rank sends to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Range of bytes in the sender's source.
    pub given: Range<usize>,
    /// Range of bytes in the receiver's buffer, for operations that do not combine.
    pub placed: Range<usize>,
}

impl Signature {
    /// Returns the share that a rank sends.
    #[inline]
    pub fn gives(&self, rank: usize) -> Share {
        self.kind.contract().gives.share_of(rank, self.root)
    }

    /// Returns the share that a rank receives.
    #[inline]
    pub fn gets(&self, rank: usize) -> Share {
        self.kind.contract().gets.share_of(rank, self.root)
    }

    /// Returns true if rank `from` sends anything to rank `to`. A rank also sends to itself.
    #[inline]
    pub fn travels(&self, from: usize, to: usize) -> bool {
        self.gives(from) != Share::None && self.gets(to) != Share::None
    }

    /// Returns the bytes of each part that rank `from` sends to rank `to`; none if no bytes are sent.
    ///
    /// For an all-reduce these are the addends of the slice that is assigned to `to`.
    pub fn routes(&self, from: usize, to: usize) -> Vec<Route> {
        if !self.travels(from, to) {
            return Vec::new();
        }
        let contract = self.kind.contract();
        let route = |extent: &Extent| {
            let size = extent.element.size();
            Route {
                given: scaled(extent.given(&contract, from, to), size),
                placed: scaled(extent.placed(&contract, from, to), size),
            }
        };
        self.extents.iter().map(route).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::element::ElementType;
    use super::super::label::Label;
    use super::super::reduction::Reduction;
    use super::*;
    use burn_fsdp_mesh::Partition;

    fn signature(kind: OperationKind, size: usize) -> Signature {
        let rows = Partition::rows(&[7, 3], size).unwrap();
        let across = Partition::flat(5, size).unwrap();
        let contract = kind.contract();
        Signature {
            kind,
            label: Label::from("x"),
            extents: vec![Extent {
                element: ElementType::U16,
                partition: rows,
                across: (contract.gets.share == Share::Across).then_some(across),
            }],
            reduction: contract.reduces.then_some(Reduction::sum()),
            root: matches!(contract.gives.who, Who::Root)
                .then_some(1)
                .or(matches!(contract.gets.who, Who::Root).then_some(1)),
        }
    }

    #[test]
    fn routes_fill_everything_a_rank_receives() {
        for size in 2..=5 {
            for kind in OperationKind::ALL {
                let signature = signature(kind, size);
                let extent = &signature.extents[0];
                let contract = kind.contract();
                for to in 0..size {
                    let routes = (0..size).flat_map(|from| signature.routes(from, to));
                    let mut placed: Vec<_> = routes.map(|route| route.placed).collect();
                    if contract.reduces {
                        // Every rank contributes a whole addend.
                        placed.dedup();
                        if contract.gets.share == Share::Own {
                            let whole = 0..2 * extent.share_len(Share::Own, to);
                            assert!(placed == vec![whole]);
                        }
                        continue;
                    }
                    let mut end = 0;
                    for range in placed {
                        assert_eq!(range.start, end, "{kind} to {to} of {size}");
                        end = range.end;
                    }
                    assert_eq!(end, 2 * extent.share_len(signature.gets(to), to));
                }
            }
        }
    }

    #[test]
    fn routes_have_equal_lengths_at_both_ends() {
        for kind in OperationKind::ALL {
            let signature = signature(kind, 4);
            for (from, to) in (0..16).map(|pair| (pair / 4, pair % 4)) {
                let given_len = 2 * signature.extents[0].share_len(signature.gives(from), from);
                for Route { given, placed } in signature.routes(from, to) {
                    assert!(given.end <= given_len);
                    if kind != OperationKind::AllReduce {
                        assert_eq!(given.len(), placed.len(), "{kind} from {from} to {to}");
                    }
                }
            }
        }
    }
}
