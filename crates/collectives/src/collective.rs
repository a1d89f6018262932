//! The collective operations of a [`ProcessGroup`].

use burn_fsdp_mesh::Partition;

use crate::call::{Call, Share};
use crate::engine::Received;
use crate::operation::OperationKind;
use crate::pending::Pending;
use crate::{Buffer, Error, FullPart, Label, Part, ProcessGroup, Reduction};

/// # Collective operations
///
/// Each comes in two forms: `start_x` publishes this rank's part and returns a [`Pending`] handle, `x`
/// is `start_x` and [`Pending::wait`]. All ranks of the group must call the same one, with the same
/// label, parts, reduction and root; only the contents of the sources and the notes differ between
/// ranks. A note is a few bytes that travel with the operation to every rank; it may be empty.
///
/// Starting fails with [`Error::Argument`] if a source or buffer has not the length in bytes that its
/// part says: this rank has then taken no part, and may call again. It fails with
/// [`Error::PeerFailed`] if a rank of the world has failed already, and with [`Error::Injected`] if a
/// [`Fault`](crate::Fault) strikes. Waiting fails as [`Pending::wait`] says.
impl ProcessGroup {
    /// Gives every rank the whole of tensors of which each rank holds a shard.
    ///
    /// Of each part, `source` is this rank's shard (`partition.range(rank)`, without padding), and
    /// `into[i]` becomes the full tensor, the shards in rank order. Shards may be uneven or empty.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    pub fn start_all_gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self.call(OperationKind::AllGather, label.into());
        call.parts(parts, Share::Own)?
            .receive(Share::Full, into)?
            .start(note)
    }

    /// [`start_all_gather`](Self::start_all_gather), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn all_gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_all_gather(label, note, parts, into)?.wait()
    }

    /// Takes part in an all-gather for the others' sake: they get this rank's shards, this rank gets
    /// notes only. To the others it is the same operation as
    /// [`start_all_gather`](Self::start_all_gather).
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    pub fn join_all_gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<Part>,
    ) -> Result<Pending, Error> {
        let call = self.call(OperationKind::AllGather, label.into());
        call.parts(parts, Share::Own)?.start(note)
    }

    /// Gives every rank its shard of the combination of all ranks' tensors.
    ///
    /// Of each part, `source` is this rank's full tensor, and `into[i]` becomes the shard
    /// `partition.range(rank)` of the result, in the reduction's output type.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], also for elements that the reduction cannot combine;
    /// [`Error::PeerFailed`].
    pub fn start_reduce_scatter(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        reduction: Reduction,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self
            .call(OperationKind::ReduceScatter, label.into())
            .reducing(reduction);
        call.parts(parts, Share::Full)?
            .receive(Share::Own, into)?
            .start(note)
    }

    /// [`start_reduce_scatter`](Self::start_reduce_scatter), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn reduce_scatter(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        reduction: Reduction,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_reduce_scatter(label, note, reduction, parts, into)?
            .wait()
    }

    /// Gives every rank the whole combination of all ranks' tensors, the same bits on all.
    ///
    /// `into[i]` becomes the full result in the reduction's output type. Each rank combines one
    /// slice of it, in memory of its pool, and reads the other slices; a rank that is not there yet
    /// has its slice combined by those that are.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], also for elements that the reduction cannot combine;
    /// [`Error::PeerFailed`].
    pub fn start_all_reduce(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        reduction: Reduction,
        parts: Vec<FullPart>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self
            .call(OperationKind::AllReduce, label.into())
            .reducing(reduction);
        let parts = self.cut(parts)?;
        call.parts(parts, Share::Full)?
            .receive(Share::Full, into)?
            .start(note)
    }

    /// [`start_all_reduce`](Self::start_all_reduce), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn all_reduce(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        reduction: Reduction,
        parts: Vec<FullPart>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_all_reduce(label, note, reduction, parts, into)?
            .wait()
    }

    /// Gives every rank the tensors of rank `root`.
    ///
    /// The sources of the other ranks must be empty: [`FullPart::absent`]. `into[i]` becomes the full
    /// tensor; the root, which has it already, gives no buffers.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    pub fn start_broadcast(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<FullPart>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self
            .call(OperationKind::Broadcast, label.into())
            .rooted(root)?;
        let (gives, gets) = match self.rank() == root {
            true => (Share::Full, Share::None),
            false => (Share::None, Share::Full),
        };
        call.parts(self.cut(parts)?, gives)?
            .receive(gets, into)?
            .start(note)
    }

    /// [`start_broadcast`](Self::start_broadcast), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn broadcast(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<FullPart>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_broadcast(label, note, root, parts, into)?.wait()
    }

    /// Gives every rank, the root included, its shard of the tensors of rank `root`.
    ///
    /// The sources are full tensors at the root and empty elsewhere: [`Part::absent`]. `into[i]`
    /// becomes the shard `partition.range(rank)`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    pub fn start_scatter(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self
            .call(OperationKind::Scatter, label.into())
            .rooted(root)?;
        let gives = if self.rank() == root {
            Share::Full
        } else {
            Share::None
        };
        call.parts(parts, gives)?
            .receive(Share::Own, into)?
            .start(note)
    }

    /// [`start_scatter`](Self::start_scatter), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn scatter(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_scatter(label, note, root, parts, into)?.wait()
    }

    /// Gives rank `root` the whole of tensors of which each rank holds a shard.
    ///
    /// The sources are the ranks' shards, the root's included. At the root `into[i]` becomes the full
    /// tensor; the other ranks give no buffers.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    pub fn start_gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self
            .call(OperationKind::Gather, label.into())
            .rooted(root)?;
        let gets = if self.rank() == root {
            Share::Full
        } else {
            Share::None
        };
        call.parts(parts, Share::Own)?
            .receive(gets, into)?
            .start(note)
    }

    /// [`start_gather`](Self::start_gather), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        root: usize,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_gather(label, note, root, parts, into)?.wait()
    }

    /// Says that this rank has come; waiting for it waits for all ranks to come.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`].
    pub fn start_barrier(&self, label: impl Into<Label>) -> Result<Pending<()>, Error> {
        let call = self.call(OperationKind::Barrier, label.into());
        Ok(call.start(Vec::new())?.map(|_| ()))
    }

    /// Waits until all ranks of the group have come.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn barrier(&self, label: impl Into<Label>) -> Result<(), Error> {
        self.start_barrier(label)?.wait()
    }

    /// Gives every rank the bytes of all ranks, by rank of the group. They may differ in length. For
    /// a few bytes of control; tensors go through [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`].
    pub fn start_exchange(
        &self,
        label: impl Into<Label>,
        bytes: Vec<u8>,
    ) -> Result<Pending<Vec<Vec<u8>>>, Error> {
        let call = self.call(OperationKind::Exchange, label.into());
        Ok(call.start(bytes)?.map(|received| received.notes))
    }

    /// [`start_exchange`](Self::start_exchange), and waits.
    ///
    /// # Errors
    ///
    /// As the start, and as [`Pending::wait`].
    pub fn exchange(&self, label: impl Into<Label>, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        self.start_exchange(label, bytes)?.wait()
    }

    /// Full parts as parts: cut so that every rank has a slice of the work.
    fn cut(&self, parts: Vec<FullPart>) -> Result<Vec<Part>, Error> {
        let cut = |FullPart {
                       source,
                       num_elements,
                       element,
                   }| {
            Ok(Part {
                source,
                partition: Partition::flat(num_elements, self.size())?,
                element,
            })
        };
        parts.into_iter().map(cut).collect()
    }

    fn call(&self, kind: OperationKind, label: Label) -> Call<'_> {
        Call::new(self, kind, label)
    }
}
