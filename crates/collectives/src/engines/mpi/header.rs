//! The headers that processes send each other in addition to the bytes of tensors.
//!
//! All numbers are little-endian. The processes of a world run the same binary, so a header has no version. A header
//! that cannot be read is reported as a failure of the rank that sent it.

use burn_fsdp_mesh::{Partition, ReduceOp};

use burn_fsdp_rendezvous::{
    Checks, ElementType, Extent, Label, LongWait, News, OperationKind, Reduction, Signature,
};

const ELEMENTS: [ElementType; 12] = [
    ElementType::F64,
    ElementType::F32,
    ElementType::F16,
    ElementType::BF16,
    ElementType::I64,
    ElementType::I32,
    ElementType::I16,
    ElementType::I8,
    ElementType::U64,
    ElementType::U32,
    ElementType::U16,
    ElementType::U8,
];

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// The encoding of `None`.
const NONE: u64 = u64::MAX;

/// A message between processes.
#[derive(Debug, PartialEq)]
pub(super) enum Header {
    /// Announces that a rank starts an operation.
    Claim(ClaimHeader),
    /// Reports news that concerns the world.
    News(News),
}

/// The header that tells another rank that this rank starts an operation.
#[derive(Debug, PartialEq)]
pub(super) struct ClaimHeader {
    /// The group's number, and the operation's sequence number in the group.
    pub(super) round: (u64, u64),
    /// The tag of the data that follows.
    pub(super) tag: u32,
    /// True if the rank needs the operation's result.
    pub(super) receives: bool,
    /// The signature, encoded by [`signature_bytes`].
    pub(super) signature: Vec<u8>,
    pub(super) note: Vec<u8>,
    pub(super) checks: Checks,
}

impl Header {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Claim(claim) => {
                out.word(0);
                out.word(claim.round.0);
                out.word(claim.round.1);
                out.word(claim.tag.into());
                out.word(claim.receives.into());
                out.bytes(&claim.signature);
                out.bytes(&claim.note);
                out.checks(&claim.checks);
            }
            Self::News(News::Failed {
                domain,
                rank,
                reason,
            }) => {
                out.word(1);
                out.word(*domain);
                out.word(*rank as u64);
                out.bytes(reason.as_bytes());
            }
            Self::News(News::Departed(rank)) => {
                out.word(2);
                out.word(*rank as u64);
            }
            Self::News(News::Waits { rank, wait }) => {
                out.word(3);
                out.word(*rank as u64);
                out.word(wait.is_some().into());
                if let Some(LongWait { missing, what }) = wait {
                    out.word(missing.len() as u64);
                    for rank in missing {
                        out.word(*rank as u64);
                    }
                    out.bytes(what.as_bytes());
                }
            }
        }
        out.0
    }

    /// Reads a header; `None` if the bytes are not a valid header.
    pub(super) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let header = match from.word()? {
            0 => Self::Claim(ClaimHeader {
                round: (from.word()?, from.word()?),
                tag: from.word()?.try_into().ok()?,
                receives: from.word()? != 0,
                signature: from.bytes()?.to_vec(),
                note: from.bytes()?.to_vec(),
                checks: from.checks()?,
            }),
            1 => Self::News(News::Failed {
                domain: from.word()?,
                rank: from.index()?,
                reason: from.text()?,
            }),
            2 => Self::News(News::Departed(from.index()?)),
            3 => Self::News(News::Waits {
                rank: from.index()?,
                wait: match from.word()? {
                    0 => None,
                    _ => Some(LongWait {
                        missing: from.indices()?,
                        what: from.text()?,
                    }),
                },
            }),
            _ => return None,
        };
        from.0.is_empty().then_some(header)
    }
}

/// Encodes a signature. Equal signatures have equal encodings.
pub(super) fn signature_bytes(signature: &Signature) -> Vec<u8> {
    let Signature {
        kind,
        label,
        extents,
        reduction,
        root,
    } = signature;
    let mut out = Writer::default();
    out.word(position(&OperationKind::ALL, kind));
    out.bytes(label.as_str().as_bytes());
    out.word(root.map_or(NONE, |root| root as u64));
    out.word(reduction.is_some().into());
    if let Some(reduction) = reduction {
        out.word(position(&OPS, &reduction.op));
        out.word(reduction.pre_scale.to_bits());
        out.word(reduction.post_scale.to_bits());
        let element = |element| position(&ELEMENTS, &element);
        out.word(reduction.output.map_or(NONE, element));
    }
    out.word(extents.len() as u64);
    for extent in extents {
        out.word(position(&ELEMENTS, &extent.element));
        out.partition(&extent.partition);
        out.word(extent.across.is_some().into());
        if let Some(across) = &extent.across {
            out.partition(across);
        }
    }
    out.0
}

/// Parses a signature from bytes; `None` if they are invalid.
pub(super) fn signature_of(bytes: &[u8]) -> Option<Signature> {
    let mut from = Reader(bytes);
    let kind = *OperationKind::ALL.get(from.index()?)?;
    let label = Label::from(from.text()?);
    let root = match from.word()? {
        NONE => None,
        root => Some(root.try_into().ok()?),
    };
    let reduction = match from.word()? {
        0 => None,
        _ => Some(Reduction {
            op: *OPS.get(from.index()?)?,
            pre_scale: f64::from_bits(from.word()?),
            post_scale: f64::from_bits(from.word()?),
            output: match from.word()? {
                NONE => None,
                element => Some(*ELEMENTS.get(usize::try_from(element).ok()?)?),
            },
        }),
    };
    let mut extents = Vec::new();
    for _ in 0..from.word()? {
        extents.push(Extent {
            element: *ELEMENTS.get(from.index()?)?,
            partition: from.partition()?,
            across: match from.word()? {
                0 => None,
                _ => Some(from.partition()?),
            },
        });
    }
    from.0.is_empty().then_some(Signature {
        kind,
        label,
        extents,
        reduction,
        root,
    })
}

fn position<T: PartialEq>(all: &[T], one: &T) -> u64 {
    let before = all.iter().take_while(|other| *other != one);
    before.count() as u64
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn word(&mut self, word: u64) {
        self.0.extend(word.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn checks(&mut self, checks: &Checks) {
        self.word(checks.given.len() as u64);
        checks.given.iter().for_each(|one| self.word(*one));
        self.word(checks.results.len() as u64);
        for (sequence, checksum) in &checks.results {
            self.word(*sequence);
            self.word(*checksum);
        }
    }

    fn partition(&mut self, partition: &Partition) {
        self.word(partition.num_rows() as u64);
        self.word(partition.row_len() as u64);
        self.word(partition.num_shards() as u64);
        // One more than the index of the sole owner; 0 if there is none.
        self.word(partition.sole_owner().map_or(0, |owner| owner as u64 + 1));
        self.word(partition.multiple() as u64);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    fn index(&mut self) -> Option<usize> {
        self.word()?.try_into().ok()
    }

    fn indices(&mut self) -> Option<Vec<usize>> {
        let len = self.index()?;
        // Each element consumes a word of the input, so an excessive length allocates nothing.
        (0..len).map(|_| self.index()).collect()
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.index()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn checks(&mut self) -> Option<Checks> {
        let given = (0..self.index()?).map(|_| self.word());
        let given = given.collect::<Option<_>>()?;
        let results = (0..self.index()?).map(|_| Some((self.word()?, self.word()?)));
        let results = results.collect::<Option<_>>()?;
        Some(Checks { given, results })
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    fn partition(&mut self) -> Option<Partition> {
        let shape = [self.index()?, self.index()?];
        let num_shards = self.index()?;
        let owner = self.index()?.checked_sub(1);
        match (owner, self.index()?) {
            (None, 1) => Partition::rows(&shape, num_shards).ok(),
            (None, multiple) if shape[1] == 1 => {
                Partition::multiples(shape[0], multiple, num_shards).ok()
            }
            (None, _) => None,
            (Some(owner), _) => {
                let num_elements = shape[0].checked_mul(shape[1])?;
                Partition::one_owner(num_elements, num_shards, owner).ok()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signatures() -> Vec<Signature> {
        let plain = Signature {
            kind: OperationKind::Barrier,
            label: Label::from("x"),
            extents: vec![],
            reduction: None,
            root: None,
        };
        let extent = |element, shape: &[usize], across| Extent {
            element,
            partition: Partition::rows(shape, 3).unwrap(),
            across,
        };
        vec![
            plain.clone(),
            Signature {
                kind: OperationKind::AllToAll,
                label: Label::from("blocks.3 \u{e9}"),
                extents: vec![
                    extent(ElementType::BF16, &[7, 3], Partition::flat(5, 3).ok()),
                    extent(ElementType::U8, &[4, 0], None),
                    extent(ElementType::F64, &[0, 9], None),
                    Extent {
                        partition: Partition::one_owner(7, 3, 2).unwrap(),
                        ..extent(ElementType::F32, &[7, 3], None)
                    },
                    Extent {
                        partition: Partition::multiples(7, 2, 3).unwrap(),
                        ..extent(ElementType::F32, &[7], None)
                    },
                ],
                ..plain.clone()
            },
            Signature {
                kind: OperationKind::Scatter,
                root: Some(2),
                ..plain.clone()
            },
            Signature {
                kind: OperationKind::AllReduce,
                reduction: Some(Reduction::mean(3).pre_scaled(0.1).output(ElementType::F16)),
                ..plain
            },
        ]
    }

    #[test]
    fn signatures_round_trip() {
        let all = signatures();
        for one in &all {
            assert_eq!(signature_of(&signature_bytes(one)).as_ref(), Some(one));
        }
        for (one, other) in all.iter().zip(&all[1..]) {
            assert_ne!(signature_bytes(one), signature_bytes(other));
        }
    }

    #[test]
    fn only_valid_headers_round_trip() {
        let claim = |signature: &Signature| {
            Header::Claim(ClaimHeader {
                round: (7 << 32, 9),
                tag: 77,
                receives: true,
                signature: signature_bytes(signature),
                note: vec![1, 2, 3],
                checks: Checks {
                    given: vec![7, u64::MAX],
                    results: vec![(u64::MAX, 3)],
                },
            })
        };
        let mut all: Vec<_> = signatures().iter().map(claim).collect();
        all.push(Header::News(News::Departed(3)));
        let wait = LongWait {
            missing: vec![0, 3],
            what: "start barrier \u{e9}".to_owned(),
        };
        let waits = |wait| Header::News(News::Waits { rank: 2, wait });
        all.extend([waits(None), waits(Some(wait))]);
        all.push(Header::News(News::Failed {
            domain: 5,
            rank: 1,
            reason: "panicked: \u{e9}".to_owned(),
        }));
        for header in &all {
            let bytes = header.to_bytes();
            assert_eq!(Header::of_bytes(&bytes).as_ref(), Some(header));
            for len in 0..bytes.len() {
                assert_eq!(Header::of_bytes(&bytes[..len]), None);
            }
            assert_eq!(Header::of_bytes(&[bytes.as_slice(), &[0]].concat()), None);
        }
    }
}
