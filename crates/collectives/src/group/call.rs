//! The arguments of one rank's call, checked before the peers see it.

use super::pending::Pending;
use super::process_group::{Contribution, ProcessGroup};
use burn_fsdp_rendezvous::{Error, Extent, Label, OperationKind, Reduction, Share, Signature};
use burn_fsdp_transport::{Buffer, Payload, Source, Space};

/// A call under construction. Each step checks the arguments that it adds.
pub(crate) struct Call<'a> {
    group: &'a ProcessGroup,
    signature: Signature,
    sources: Vec<Source>,
    into: Vec<Buffer>,
    /// The memory that holds the bytes, once there are any.
    space: Option<Space>,
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
            space: None,
        }
    }

    pub(crate) fn reducing(mut self, reduction: Reduction) -> Self {
        self.signature.reduction = Some(reduction);
        self
    }

    pub(crate) fn rooted(mut self, root: usize) -> Result<Self, Error> {
        self.signature.root = Some(root);
        let size = self.group.size();
        if root < size {
            Ok(self)
        } else {
            Err(self.argument("root", format!("a rank below {size}"), root.to_string()))
        }
    }

    /// Adds the parts: the tensors, and the bytes that this rank contributes to them.
    pub(crate) fn parts(
        mut self,
        parts: impl IntoIterator<Item = (Source, Extent)>,
    ) -> Result<Self, Error> {
        for (index, (source, extent)) in parts.into_iter().enumerate() {
            let size = self.group.size();
            for partition in [Some(extent.partition), extent.across]
                .into_iter()
                .flatten()
            {
                let num_shards = partition.num_shards();
                if num_shards != size {
                    let argument = format!("parts[{index}].partition");
                    let [expected, got] = [size, num_shards].map(|n| format!("in {n} shards"));
                    return Err(self.argument(argument, expected, got));
                }
            }
            // Uses the widest of the input and any output type, so no later size can overflow.
            let across = extent.across.map_or(1, |across| across.num_elements());
            let num_elements = extent.partition.num_elements().checked_mul(across);
            let num_bytes = num_elements.and_then(|len| len.checked_mul(size_of::<f64>()));
            if num_bytes.is_none() {
                let expected = "small enough for its bytes to fit in a usize".to_owned();
                let got = extent.partition.to_string();
                return Err(self.argument(format!("parts[{index}]"), expected, got));
            }
            let element = extent.element;
            if let Some(objection) = self.signature.reduction.and_then(|r| r.objection(element)) {
                let expected = "a type that the reduction supports".to_owned();
                return Err(self.argument(format!("parts[{index}]"), expected, objection));
            }
            let gives = self.signature.gives(self.group.rank());
            let len = extent.share_len(gives, self.group.rank()) * element.size();
            if source.len() != len {
                let argument = format!("parts[{index}].source");
                return Err(self.argument(argument, bytes(len), bytes(source.len())));
            }
            let argument = || format!("parts[{index}].source");
            let is_shared = source.payload().is_some_and(Payload::is_shared);
            self.check_space(len, (source.space(), is_shared), argument)?;
            self.signature.extents.push(extent);
            self.sources.push(source);
        }
        Ok(self)
    }

    /// Adds the buffers for this rank's results.
    pub(crate) fn receive(mut self, into: Vec<Buffer>) -> Result<Self, Error> {
        let gets = self.signature.gets(self.group.rank());
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
            let len = extent.share_len(gets, self.group.rank()) * output.size();
            if buffer.len() != len {
                let got = bytes(buffer.len());
                return Err(self.argument(format!("into[{index}]"), bytes(len), got));
            }
        }
        for (index, buffer) in into.iter().enumerate() {
            let argument = || format!("into[{index}]");
            let is_shared = buffer.memory().is_some();
            self.check_space(buffer.len(), (buffer.space(), is_shared), argument)?;
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
            ..
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

    /// Checks that the engine accepts bytes in this memory, and that all bytes of the call are in the same memory.
    #[inline]
    fn check_space(
        &mut self,
        len: usize,
        (space, is_shared): (Space, bool),
        argument: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        // The first comparison is cheap and succeeds for nearly all calls.
        if matches!((self.space, space), (Some(Space::Host), Space::Host))
            || len == 0
            || self.space == Some(space)
        {
            return Ok(());
        }
        let expected = match self.space {
            Some(space) => format!("in {space} (like the other bytes of the call)"),
            None if self.group.takes(space) || is_shared && self.group.shares_devices() => {
                self.space = Some(space);
                return Ok(());
            }
            None if self.group.compares_bytes() => {
                format!("in {} (because ranks compare bytes)", Space::Host)
            }
            None => format!("in memory that engine `{}` takes", self.group.engine()),
        };
        Err(self.argument(argument(), expected, format!("in {space}")))
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
