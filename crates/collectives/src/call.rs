//! What one rank asks for in one operation, checked before the peers hear of it.

use burn_fsdp_mesh::Partition;

use crate::group::Contribution;
use crate::operation::{Extent, OperationKind, Signature};
use crate::pending::Pending;
use crate::{Buffer, ElementType, Error, Label, Part, ProcessGroup, Reduction, Source};

/// How much of each tensor a rank gives or gets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    None,
    /// The shard of this rank.
    Own,
    Full,
}

/// A call in the making: each step checks what it adds.
pub(crate) struct Call<'a> {
    group: &'a ProcessGroup,
    signature: Signature,
    sources: Vec<Source>,
    into: Vec<Buffer>,
}

impl<'a> Call<'a> {
    pub(crate) fn new(group: &'a ProcessGroup, kind: OperationKind, label: Label) -> Self {
        let signature = Signature {
            kind,
            label,
            extents: vec![],
            reduction: None,
            root: None,
        };
        Self {
            group,
            signature,
            sources: Vec::new(),
            into: Vec::new(),
        }
    }

    pub(crate) fn reducing(mut self, reduction: Reduction) -> Self {
        self.signature.reduction = Some(reduction);
        self
    }

    pub(crate) fn rooted(mut self, root: usize) -> Result<Self, Error> {
        self.signature.root = Some(root);
        let size = self.group.size();
        match root < size {
            true => Ok(self),
            false => Err(self.argument("root", format!("a rank below {size}"), root.to_string())),
        }
    }

    /// Adds the parts, of each of which this rank gives `gives`.
    pub(crate) fn parts(mut self, parts: Vec<Part>, gives: Share) -> Result<Self, Error> {
        for (
            index,
            Part {
                source,
                partition,
                element,
            },
        ) in parts.into_iter().enumerate()
        {
            let (num_shards, size) = (partition.num_shards(), self.group.size());
            if num_shards != size {
                let argument = format!("parts[{index}].partition");
                let [expected, got] = [size, num_shards].map(|n| format!("in {n} shards"));
                return Err(self.argument(argument, expected, got));
            }
            // Widest of the input and any output, so that no later size can overflow.
            if partition
                .num_elements()
                .checked_mul(size_of::<f64>())
                .is_none()
            {
                let expected = "of a size that a usize counts in bytes".to_owned();
                return Err(self.argument(
                    format!("parts[{index}]"),
                    expected,
                    partition.to_string(),
                ));
            }
            if let Some(objection) = self.signature.reduction.and_then(|r| r.objection(element)) {
                let expected = "elements that the reduction can combine".to_owned();
                return Err(self.argument(format!("parts[{index}]"), expected, objection));
            }
            let len = self.share_len(gives, &partition, element);
            if source.len() != len {
                let argument = format!("parts[{index}].source");
                return Err(self.argument(argument, bytes(len), bytes(source.len())));
            }
            self.signature.extents.push(Extent { element, partition });
            self.sources.push(source);
        }
        Ok(self)
    }

    /// Adds the buffers, each of which gets `gets` of its part.
    pub(crate) fn receive(mut self, gets: Share, into: Vec<Buffer>) -> Result<Self, Error> {
        let num_buffers = if gets == Share::None {
            0
        } else {
            self.sources.len()
        };
        if into.len() != num_buffers {
            let [expected, got] = [num_buffers, into.len()].map(|n| format!("{n} buffers"));
            return Err(self.argument("into", expected, got));
        }
        for (index, (buffer, extent)) in into.iter().zip(&self.signature.extents).enumerate() {
            let input = extent.element;
            let output = self
                .signature
                .reduction
                .map_or(input, |r| r.output_of(input));
            let len = self.share_len(gets, &extent.partition, output);
            if buffer.len() != len {
                let got = bytes(buffer.len());
                return Err(self.argument(format!("into[{index}]"), bytes(len), got));
            }
        }
        self.into = into;
        Ok(self)
    }

    pub(crate) fn start(self, note: Vec<u8>) -> Result<Pending, Error> {
        let Self {
            group,
            signature,
            sources,
            into,
        } = self;
        let bytes = match signature.kind {
            OperationKind::Exchange => note.len(),
            _ => signature.num_bytes(),
        };
        group.start(
            signature,
            Contribution {
                note,
                sources,
                into,
                bytes,
            },
        )
    }

    /// Bytes of this rank's share of a tensor.
    fn share_len(&self, share: Share, partition: &Partition, element: ElementType) -> usize {
        let num_elements = match share {
            Share::None => 0,
            Share::Own => partition.len(self.group.rank()),
            Share::Full => partition.num_elements(),
        };
        num_elements * element.size()
    }

    fn argument(&self, argument: impl Into<String>, expected: String, got: String) -> Error {
        let operation = Box::new(self.group.next_operation(&self.signature));
        let rank = self.group.world_rank();
        Error::Argument {
            rank,
            operation,
            argument: argument.into(),
            expected,
            got,
        }
    }
}

fn bytes(len: usize) -> String {
    format!("{len} bytes")
}
