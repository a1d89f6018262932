//! The collective operations of a [`ProcessGroup`].

use burn_fsdp_mesh::Partition;

use super::call::Call;
use super::part::{CrossPart, FullPart, Part};
use super::pending::Pending;
use super::process_group::ProcessGroup;
use super::received::Received;
use burn_fsdp_rendezvous::{ElementType, Error, Extent, Label, OperationKind, Reduction};
use burn_fsdp_transport::{Buffer, Source};

/// # Collective operations
///
/// Each operation has two forms: `start_x` publishes this rank's part and returns a [`Pending`] handle; `x` is
/// `start_x` followed by [`Pending::wait`]. All ranks of the group must call the same operation with the same label,
/// parts, reduction and root. Only the contents of the sources and the notes may differ between ranks. A note is a few
/// bytes that the operation sends to every rank; it may be empty.
///
/// Starting fails with [`Error::Argument`] if the length in bytes of a source or buffer does not match its part. In
/// that case, this rank has not taken part and may call again. Starting fails with [`Error::PeerFailed`] if the group's
/// failure domain has already ended, with [`Error::AlteredAtRest`] if a source does not match its seal, and with
/// [`Error::Injected`] if a [`Fault`](crate::Fault) is triggered. [`Pending::wait`] lists the errors of waiting.
impl ProcessGroup {
    /// Gathers full tensors on every rank. Each rank holds a shard of them.
    ///
    /// For each part, `source` is this rank's shard (`partition.range(rank)`, without padding). `into[i]` becomes the
    /// full tensor, with the shards in rank order. Shards may be uneven or empty.
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
        call.parts(cut(parts))?.receive(into)?.start(note)
    }

    /// Calls [`start_all_gather`](Self::start_all_gather) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
    pub fn all_gather(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<Part>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_all_gather(label, note, parts, into)?.wait()
    }

    /// Takes part in an all-gather only for the other ranks. They receive this rank's shards, and this rank receives
    /// only notes. To the others it is the same operation as [`start_all_gather`](Self::start_all_gather).
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
        call.parts(cut(parts))?.start(note)
    }

    /// Combines all ranks' tensors, and returns this rank's shard of the result.
    ///
    /// For each part, `source` is this rank's full tensor. `into[i]` becomes the shard `partition.range(rank)` of the
    /// result, in the reduction's output type.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], including for elements that the reduction cannot combine; [`Error::PeerFailed`].
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
        call.parts(cut(parts))?.receive(into)?.start(note)
    }

    /// Calls [`start_reduce_scatter`](Self::start_reduce_scatter) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
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

    /// Combines all ranks' tensors, and returns the whole result, bit-identical on all ranks.
    ///
    /// `into[i]` becomes the full result in the reduction's output type. Each rank combines one slice of it, in memory
    /// from its pool, and reads the other slices. If a rank is late, the ranks that have arrived combine its slice.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], including for elements that the reduction cannot combine; [`Error::PeerFailed`].
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
        let parts = self.sliced(parts)?;
        call.parts(parts)?.receive(into)?.start(note)
    }

    /// Calls [`start_all_reduce`](Self::start_all_reduce) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
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

    /// Sends the tensors of rank `root` to every rank.
    ///
    /// The other ranks pass empty sources ([`FullPart::absent`]). `into[i]` becomes the full tensor. The root already
    /// has it and passes no buffers.
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
        let parts = self.sliced(parts)?;
        call.parts(parts)?.receive(into)?.start(note)
    }

    /// Calls [`start_broadcast`](Self::start_broadcast) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
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

    /// Sends every rank, including the root, its shard of the tensors of rank `root`.
    ///
    /// The root passes full tensors, and the other ranks pass empty sources ([`Part::absent`]). `into[i]` becomes the
    /// shard `partition.range(rank)`.
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
        call.parts(cut(parts))?.receive(into)?.start(note)
    }

    /// Calls [`start_scatter`](Self::start_scatter) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
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

    /// Gathers full tensors on rank `root`. Each rank holds a shard of them.
    ///
    /// The sources are the ranks' shards, including the root's. At the root `into[i]` becomes the full tensor; the
    /// other ranks pass no buffers.
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
        call.parts(cut(parts))?.receive(into)?.start(note)
    }

    /// Calls [`start_gather`](Self::start_gather) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
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

    /// Changes the dim along which tensors are sharded. Each rank contributes its shard along one dim and receives its
    /// shard along another: from each rank the elements that the two shards have in common.
    ///
    /// For each part, `source` is this rank's shard along the first dim, ordered by destination: for each rank `q` the
    /// `from.len(rank) * to.len(q)` elements that `q` receives. `into[i]` becomes this rank's shard along the second
    /// dim, ordered by origin: for each rank `p` the `from.len(p) * to.len(rank)` elements that `p` held. Shards may be
    /// uneven or empty.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`], [`Error::PeerFailed`].
    ///
    /// ```
    /// use burn_fsdp_collectives::{
    ///     CrossPart, ElementType, Error, LaunchConfig, Partition, ProcessGroup, Source, launch,
    /// };
    ///
    /// // A matrix of 2 x 2 bytes: from one row per rank to one column per rank.
    /// fn body(world: ProcessGroup) -> Result<Vec<u8>, Error> {
    ///     let line = Partition::flat(2, world.size())?;
    ///     let row = [[1u8, 2], [3, 4]][world.rank()];
    ///     let part = CrossPart::new(Source::new(row), line, line, ElementType::U8);
    ///     let column = vec![world.pool().take(2)];
    ///     let received = world.all_to_all("transpose", vec![], vec![part], column)?;
    ///     Ok(received.buffers[0].as_ref().to_vec())
    /// }
    ///
    /// assert_eq!(launch(LaunchConfig::new(2), body)?, [[1, 3], [2, 4]]);
    /// # Ok::<(), burn_fsdp_collectives::LaunchError>(())
    /// ```
    pub fn start_all_to_all(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<CrossPart>,
        into: Vec<Buffer>,
    ) -> Result<Pending, Error> {
        let call = self.call(OperationKind::AllToAll, label.into());
        let crossed = |part: CrossPart| {
            let CrossPart {
                source,
                from,
                to,
                element,
            } = part;
            let extent = Extent {
                element,
                partition: from,
                across: Some(to),
            };
            (source, extent)
        };
        call.parts(parts.into_iter().map(crossed))?
            .receive(into)?
            .start(note)
    }

    /// Calls [`start_all_to_all`](Self::start_all_to_all) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
    pub fn all_to_all(
        &self,
        label: impl Into<Label>,
        note: Vec<u8>,
        parts: Vec<CrossPart>,
        into: Vec<Buffer>,
    ) -> Result<Received, Error> {
        self.start_all_to_all(label, note, parts, into)?.wait()
    }

    /// Announces that this rank has arrived. To wait for all ranks to arrive, wait on the returned handle.
    ///
    /// # Errors
    ///
    /// [`Error::PeerFailed`].
    pub fn start_barrier(&self, label: impl Into<Label>) -> Result<Pending<()>, Error> {
        let call = self.call(OperationKind::Barrier, label.into());
        Ok(call.start(Vec::new())?.map(|_| ()))
    }

    /// Waits until all ranks of the group have arrived.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
    pub fn barrier(&self, label: impl Into<Label>) -> Result<(), Error> {
        self.start_barrier(label)?.wait()
    }

    /// Sends the bytes of all ranks to every rank, which gets them in rank order. Lengths may differ. It is meant for a
    /// few bytes of control data; use [`all_gather`](Self::all_gather) for tensors.
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

    /// Calls [`start_exchange`](Self::start_exchange) and waits.
    ///
    /// # Errors
    ///
    /// The errors of the start and of [`Pending::wait`].
    pub fn exchange(&self, label: impl Into<Label>, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
        self.start_exchange(label, bytes)?.wait()
    }

    /// Partitions full tensors so that every rank has a slice of the work.
    fn sliced(&self, parts: Vec<FullPart>) -> Result<Vec<(Source, Extent)>, Error> {
        let sliced = |FullPart {
                          source,
                          num_elements,
                          element,
                      }| {
            let partition = Partition::flat(num_elements, self.size())?;
            Ok((source, extent(element, partition)))
        };
        parts.into_iter().map(sliced).collect()
    }

    fn call(&self, kind: OperationKind, label: Label) -> Call<'_> {
        Call::new(self, kind, label)
    }
}

/// Returns the source and extent of each partitioned tensor.
fn cut(parts: Vec<Part>) -> impl Iterator<Item = (Source, Extent)> {
    parts
        .into_iter()
        .map(|part| (part.source, extent(part.element, part.partition)))
}

fn extent(element: ElementType, partition: Partition) -> Extent {
    Extent {
        element,
        partition,
        across: None,
    }
}
