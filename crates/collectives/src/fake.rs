//! The engine of a rank without peers, which pretends that they are there.
//!
//! Every operation is complete at once: the peers are taken to have contributed what this rank did.
//! So a training step of one rank of many runs on one thread, with the operations, the buffers and
//! the memory that it would have among real peers. Only the values are made up.

use crate::arithmetic::{copy, reduce};
use crate::engine::{Engine, Flight, Received, Request, Subgroup};
use crate::operation::{Extent, OperationKind};
use crate::{Buffer, ElementType, Error, Reduction, Source};

/// One rank's end of a group whose other ranks do not exist.
#[derive(Debug)]
pub(crate) struct FakeEnd {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Engine for FakeEnd {
    fn start(&self, request: Request) -> Result<Box<dyn Flight>, Error> {
        Ok(Box::new(FakeFlight {
            rank: self.rank,
            size: self.size,
            request: Some(request),
        }))
    }

    fn subgroup(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        Box::new(Self {
            rank: subgroup.rank,
            size: subgroup.members.len(),
        })
    }

    fn has_peers(&self) -> bool {
        false
    }
}

struct FakeFlight {
    rank: usize,
    size: usize,
    /// Taken by the wait, with which the sources are dropped.
    request: Option<Request>,
}

impl Flight for FakeFlight {
    fn wait(&mut self) -> Result<Received, Error> {
        let Some(request) = self.request.take() else {
            unreachable!("an operation is waited for once");
        };
        let Request {
            signature,
            note,
            sources,
            into: mut buffers,
            ..
        } = request;
        let reduction = signature.reduction.unwrap_or(Reduction::sum());
        let parts = signature.extents.iter().zip(&sources).zip(&mut buffers);
        for ((extent, source), buffer) in parts {
            match signature.kind {
                OperationKind::AllGather | OperationKind::Gather => {
                    self.repeat(extent, source, buffer);
                }
                OperationKind::ReduceScatter => {
                    let own = self.own_bytes(extent, source);
                    self.combine(&reduction, extent.element, own, buffer);
                }
                OperationKind::AllReduce => {
                    self.combine(&reduction, extent.element, source.as_bytes(), buffer);
                }
                // Only the root has a source; what it would have sent elsewhere is not known.
                OperationKind::Scatter if !source.is_empty() => {
                    copy(self.own_bytes(extent, source), buffer.as_mut());
                }
                OperationKind::Scatter | OperationKind::Broadcast => buffer.as_mut().fill(0),
                OperationKind::Barrier | OperationKind::Exchange => {}
            }
        }
        let notes = vec![note; self.size];
        Ok(Received { buffers, notes })
    }

    fn wait_released(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

impl FakeFlight {
    /// This rank's shard of its full tensor.
    fn own_bytes<'a>(&self, extent: &Extent, source: &'a Source) -> &'a [u8] {
        let range = extent.partition.range(self.rank);
        let size = extent.element.size();
        &source.as_bytes()[range.start * size..range.end * size]
    }

    /// Puts this rank's shard in every rank's place, as far as it fits; the rest is zero.
    fn repeat(&self, extent: &Extent, source: &Source, buffer: &mut Buffer) {
        let own = source.as_bytes();
        let full = buffer.as_mut();
        for rank in 0..self.size {
            let range = extent.partition.range(rank);
            let size = extent.element.size();
            let place = &mut full[range.start * size..range.end * size];
            let (fits, rest) = place.split_at_mut(own.len().min(place.len()));
            copy(&own[..fits.len()], fits);
            rest.fill(0);
        }
    }

    /// Combines as many copies of this rank's elements as there are ranks.
    fn combine(&self, by: &Reduction, element: ElementType, own: &[u8], buffer: &mut Buffer) {
        reduce(by, element, &vec![own; self.size], buffer.as_mut());
    }
}
