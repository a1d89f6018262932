//! Calls to MPI. All `unsafe` code of this crate is here and in `landing.rs`.
//!
//! The same argument makes every call sound. MPI is called only from the thread that initialised it: [`Wire`] and
//! [`Transfer`] are not `Send`. The memory that a request reads or writes is owned by the [`Transfer`] that holds the
//! request. A transfer that is dropped before its request is complete leaks that memory, because MPI may still use it.

#![allow(
    unsafe_code,
    reason = "MPI is a C library; rsmpi's own requests borrow their buffers"
)]

use std::marker::PhantomData;
use std::ops::Range;
use std::os::raw::{c_int, c_void};
use std::sync::Arc;

use mpi::environment::Universe;
use mpi::topology::{AsCommunicator, Communicator};
use mpi::traits::AsRaw;
use mpi::{Threading, ffi};

use super::landing::Landing;
use burn_fsdp_transport::{BufferPool, Source};

/// The maximum number of bytes in one message, because MPI counts in `int`.
const MOST_BYTES: usize = 1 << 30;

/// The tag of headers. Data uses the tags from [`FIRST_DATA_TAG`] on.
const HEADER_TAG: c_int = 1;

/// The first tag of data messages.
pub(super) const FIRST_DATA_TAG: u32 = 2;

/// The largest tag that every MPI supports.
pub(super) const LAST_DATA_TAG: u32 = 32_767;

/// The error of an MPI call.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{call} failed: {reason}")]
pub(super) struct WireError {
    call: &'static str,
    reason: String,
}

/// This process's connection to MPI.
pub(super) struct Wire {
    /// The environment of MPI. Dropping it finalises MPI.
    universe: Option<Universe>,
    world: ffi::MPI_Comm,
    /// Memory for incoming headers.
    headers: BufferPool,
    /// MPI may be used only by the thread that initialised it.
    not_send: PhantomData<*const ()>,
}

/// A message in transit.
pub(super) struct Transfer {
    request: ffi::MPI_Request,
    memory: Option<Memory>,
    not_send: PhantomData<*const ()>,
}

/// A header that has begun to arrive.
pub(super) struct Incoming {
    /// The sending rank.
    pub(super) from: usize,
    transfer: Transfer,
    landing: Arc<Landing>,
}

impl Incoming {
    pub(super) fn is_complete(&mut self) -> Result<bool, WireError> {
        self.transfer.is_complete()
    }

    /// Returns the message's bytes, once it is complete.
    pub(super) fn take(self) -> Vec<u8> {
        let buffers = self.landing.take();
        buffers
            .first()
            .map_or_else(Vec::new, |bytes| bytes.as_ref().to_vec())
    }
}

/// The memory that a message is read from or written to.
enum Memory {
    Read(#[allow(dead_code, reason = "owned for the time of the transfer")] Source),
    Written(#[allow(dead_code, reason = "owned for the time of the transfer")] Arc<Landing>),
}

fn check(call: &'static str, code: c_int) -> Result<(), WireError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the text has the length that MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let text = &text[..usize::try_from(len).unwrap_or(0).min(text.len())];
    Err(WireError {
        call,
        reason: String::from_utf8_lossy(text).into_owned(),
    })
}

impl Wire {
    /// Initialises MPI. Call it once per process.
    pub(super) fn start() -> Result<Self, WireError> {
        let failed = |reason: &str| WireError {
            call: "MPI_Init_thread",
            reason: reason.to_owned(),
        };
        let (universe, provided) = mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| failed("MPI was already initialised in this process"))?;
        if provided < Threading::Funneled {
            return Err(failed(
                "this MPI does not support a second thread in a process; use an MPI with \
                 MPI_THREAD_FUNNELED",
            ));
        }
        let world = universe.world().as_communicator().as_raw();
        // SAFETY: the communicator is the world's, which lives as long as MPI.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        Ok(Self {
            universe: Some(universe),
            world,
            headers: BufferPool::default(),
            not_send: PhantomData,
        })
    }

    /// Returns this process's rank, and the number of ranks.
    pub(super) fn place(&self) -> (usize, usize) {
        let world = self.universe.as_ref().map(Universe::world);
        let place = world.map(|world| (world.rank(), world.size()));
        let (rank, size) = place.unwrap_or((0, 1));
        (rank as usize, size as usize)
    }

    /// Sends a header. MPI reads it until the transfer is complete.
    pub(super) fn send_header(&self, header: Source, to: usize) -> Result<Transfer, WireError> {
        let range = 0..header.len();
        self.send_piece(&header, range, to, HEADER_TAG)
    }

    /// Sends a range of a source's bytes, in as many messages as necessary.
    pub(super) fn send(
        &self,
        source: &Source,
        range: Range<usize>,
        to: usize,
        tag: u32,
    ) -> Result<Vec<Transfer>, WireError> {
        pieces(range)
            .map(|piece| self.send_piece(source, piece, to, tag as c_int))
            .collect()
    }

    fn send_piece(
        &self,
        source: &Source,
        range: Range<usize>,
        to: usize,
        tag: c_int,
    ) -> Result<Transfer, WireError> {
        let bytes = &source.as_bytes()[range];
        let mut request = null_request();
        // SAFETY: a source does not move or change its bytes while a clone of it is alive, and the transfer keeps one.
        let code = unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast::<c_void>(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag,
                self.world,
                &mut request,
            )
        };
        check("MPI_Isend", code)?;
        Ok(Transfer::new(request, Memory::Read(source.clone())))
    }

    /// Receives bytes into a range of a landing, in as many messages as they were sent in.
    pub(super) fn receive(
        &self,
        landing: &Arc<Landing>,
        buffer: usize,
        range: Range<usize>,
        from: usize,
        tag: u32,
    ) -> Result<Vec<Transfer>, WireError> {
        let piece = |piece: Range<usize>| {
            let mut request = null_request();
            let len = piece.len() as c_int;
            // SAFETY: the landing owns the memory and checks its bounds. Nobody else touches the range until the
            // landing is taken, which is after this transfer. The transfer keeps the landing alive.
            let code = unsafe {
                ffi::MPI_Irecv(
                    landing.place(buffer, piece).cast::<c_void>(),
                    len,
                    ffi::RSMPI_UINT8_T,
                    from as c_int,
                    tag as c_int,
                    self.world,
                    &mut request,
                )
            };
            check("MPI_Irecv", code)?;
            Ok(Transfer::new(request, Memory::Written(landing.clone())))
        };
        pieces(range).map(piece).collect()
    }

    /// Returns a header that has begun to arrive, if there is one.
    pub(super) fn next_header(&self) -> Result<Option<Incoming>, WireError> {
        let (mut flag, mut len) = (0, 0);
        // SAFETY: the two values are plain C structures that MPI fills; all zeros are valid for both.
        let (mut message, mut status) =
            unsafe { std::mem::zeroed::<(ffi::MPI_Message, ffi::MPI_Status)>() };
        // SAFETY: all pointers are valid throughout the call.
        let code = unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                HEADER_TAG,
                self.world,
                &mut flag,
                &mut message,
                &mut status,
            )
        };
        check("MPI_Improbe", code)?;
        if flag == 0 {
            return Ok(None);
        }
        // SAFETY: the status belongs to the message that was found.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut len) };
        check("MPI_Get_count", code)?;
        let num_bytes = usize::try_from(len).unwrap_or(0);
        let landing = Arc::new(Landing::new(vec![self.headers.take(num_bytes)]));
        let mut request = null_request();
        // SAFETY: the landing has as many bytes as the message. Nobody else touches it until it is taken, which is
        // after this transfer. The transfer keeps it alive.
        let code = unsafe {
            ffi::MPI_Imrecv(
                landing.place(0, 0..num_bytes).cast::<c_void>(),
                len,
                ffi::RSMPI_UINT8_T,
                &mut message,
                &mut request,
            )
        };
        check("MPI_Imrecv", code)?;
        Ok(Some(Incoming {
            from: status.MPI_SOURCE as usize,
            transfer: Transfer::new(request, Memory::Written(landing.clone())),
            landing,
        }))
    }

    /// Leaves MPI without the others, because one of them may never finalise it.
    pub(super) fn leave(mut self) {
        std::mem::forget(self.universe.take());
    }
}

impl Transfer {
    fn new(request: ffi::MPI_Request, memory: Memory) -> Self {
        Self {
            request,
            memory: Some(memory),
            not_send: PhantomData,
        }
    }

    /// Lets MPI make progress and returns whether the transfer is complete. Its memory is then released.
    pub(super) fn is_complete(&mut self) -> Result<bool, WireError> {
        if self.memory.is_none() {
            return Ok(true);
        }
        let mut flag = 0;
        // SAFETY: the request was made by MPI and is not complete yet; its memory is alive.
        let code = unsafe { ffi::MPI_Test(&mut self.request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check("MPI_Test", code)?;
        if flag != 0 {
            self.memory = None;
        }
        Ok(flag != 0)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // MPI may still read or write it.
        std::mem::forget(self.memory.take());
    }
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

/// Splits a range of bytes into the ranges of its messages; none if the range is empty.
fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(MOST_BYTES)
        .map(move |start| start..end.min(start + MOST_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_cut_into_messages_that_mpi_can_count() {
        assert_eq!(pieces(5..5).count(), 0);
        assert!(pieces(5..6).eq(std::iter::once(5..6)));
        let cut: Vec<_> = pieces(7..7 + (5 << 30) + 3).collect();
        assert_eq!(cut.len(), 6);
        assert!(cut.iter().all(|piece| piece.len() <= MOST_BYTES));
        assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!((cut[0].start, cut[5].end), (7, 7 + (5 << 30) + 3));
    }
}
