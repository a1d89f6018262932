//! A custom engine for a sharded module: it replaces all-gathers and reduce-scatters, and leaves all other operations
//! to the engine of the launch.
//!
//! Ranks are threads. They put their sources on a shelf, and each rank copies the bytes that it needs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_fsdp_collectives::engine::*;
use burn_fsdp_collectives::{Buffer, Operation, OperationKind, Source};

/// The sources of one operation, indexed by rank.
#[derive(Debug)]
pub struct Shelf {
    places: Vec<Mutex<Option<Arc<[Source]>>>>,
    /// The number of ranks that may still read, plus one until the places are empty.
    num_open: AtomicUsize,
}

/// The shelves of all operations, keyed by group number and sequence number. All ranks share them.
pub type Shelves = Arc<Mutex<HashMap<(u64, u64), Arc<Shelf>>>>;

/// A rank's handle to a group.
#[derive(Debug)]
pub struct ShelfEngine {
    /// Carries the claims, and the operations that this engine does not replace.
    inner: Box<dyn Engine>,
    group: Subgroup,
    shelves: Shelves,
}

impl ShelfEngine {
    /// Returns a rank's handle, for `ProcessGroup::on_engine`.
    pub fn end(inner: Box<dyn Engine>, group: &Subgroup, shelves: &Shelves) -> Box<dyn Engine> {
        let (group, shelves) = (group.clone(), shelves.clone());
        Box::new(Self {
            inner,
            group,
            shelves,
        })
    }
}

impl Messages for ShelfEngine {
    fn control(&self) -> &Arc<Control> {
        self.inner.control()
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        self.inner.post(operation, claim)
    }
}

impl Engine for ShelfEngine {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        use OperationKind::{AllGather, ReduceScatter};
        if !matches!(request.operation.kind, AllGather | ReduceScatter) {
            return self.inner.start(request);
        }
        let (rank, size) = (self.group.rank, self.group.members.len());
        let key = (self.group.number, request.operation.sequence);
        let mut shelves = self.shelves.lock().unwrap();
        let shelf = shelves.entry(key).or_insert_with(|| {
            let places = (0..size).map(|_| Mutex::default()).collect();
            let num_open = AtomicUsize::new(size + 1);
            Arc::new(Shelf { places, num_open })
        });
        let shelf = shelf.clone();
        *shelf.places[rank].lock().unwrap() = Some(request.sources.into());
        let is_full = |shelf: &Shelf| {
            shelf
                .places
                .iter()
                .all(|place| place.lock().unwrap().is_some())
        };
        if is_full(&shelf) {
            // Every rank already has a reference to the shelf.
            shelves.remove(&key);
        }
        Box::new(ShelfFlight {
            // Posted after the sources, so a rank that has all claims finds all sources.
            meeting: self.inner.post(&request.operation, request.claim),
            control: self.control().clone(),
            shelf,
            rank,
            into: request.into,
            findings: Findings::default(),
            is_done: false,
        })
    }

    fn split(&self, group: Subgroup) -> Box<dyn Engine> {
        Self::end(self.inner.split(group.clone()), &group, &self.shelves)
    }
}

/// A rank's part in one operation.
struct ShelfFlight {
    meeting: Arc<dyn Meeting>,
    control: Arc<Control>,
    shelf: Arc<Shelf>,
    rank: usize,
    into: Vec<Buffer>,
    findings: Findings,
    is_done: bool,
}

impl ShelfFlight {
    /// Fills the buffers. Reductions add in rank order, so the bits are the same as with any other engine.
    fn fill(&mut self, sources: &[Arc<[Source]>], into: &mut [Buffer]) {
        let signature = &self.meeting.claim(self.rank).signature;
        for (part, buffer) in into.iter_mut().enumerate() {
            let (out, num_ranks) = (buffer.as_mut(), sources.len());
            let route = |from| signature.routes(from, self.rank).swap_remove(part);
            let given = |from: usize| &sources[from][part].as_bytes()[route(from).given];
            match &signature.reduction {
                None => {
                    (0..num_ranks).for_each(|from| copy(given(from), &mut out[route(from).placed]))
                }
                Some(reduction) => {
                    let addends: Vec<_> = (0..num_ranks).map(given).collect();
                    reduce(reduction, signature.extents[part].element, &addends, out);
                }
            }
        }
    }

    /// Compares the addends with the checksums that their ranks announced. The group compares moved bytes.
    fn compare(&mut self, sources: &[Arc<[Source]>]) {
        self.findings.altered = (0..sources.len()).find_map(|from| {
            let Claim {
                signature, checks, ..
            } = self.meeting.claim(from);
            let routes = signature.routes(from, self.rank);
            let given = (0..routes.len())
                .map(|part| &sources[from][part].as_bytes()[routes[part].given.clone()]);
            let part = checks.first_altered(self.rank, given)?;
            Some(AlteredPart::on_its_way(from, part))
        });
    }

    /// Ends this rank's reads. The last rank to finish empties the shelf.
    fn finish(&mut self) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        let empty = |place: &Mutex<_>| *place.lock().unwrap() = None;
        if self.control.failure().is_some() {
            // Some ranks may never finish.
            empty(&self.shelf.places[self.rank]);
        }
        if self.shelf.num_open.fetch_sub(1, Ordering::AcqRel) == 2 {
            self.shelf.places.iter().for_each(empty);
            self.shelf.num_open.store(0, Ordering::Release);
        }
        self.control.ring();
    }
}

impl Flight for ShelfFlight {
    fn meeting(&self) -> &dyn Meeting {
        &*self.meeting
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Result => true,
            Awaited::Release => self.shelf.num_open.load(Ordering::Acquire) == 0,
        }
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        (0..self.shelf.places.len())
            .filter(|rank| *rank != self.rank)
            .collect()
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        let sources = self
            .shelf
            .places
            .iter()
            .map(|place| place.lock().unwrap().clone());
        let sources: Vec<_> = sources.collect::<Option<_>>().ok_or(Stopped::Withdrawn)?;
        let mut buffers = std::mem::take(&mut self.into);
        self.fill(&sources, &mut buffers);
        if self.meeting.claim(self.rank).signature.reduction.is_some() {
            self.compare(&sources);
        }
        drop(sources);
        self.finish();
        Ok(Completion::Done(buffers))
    }

    fn findings(&mut self) -> Findings {
        std::mem::take(&mut self.findings)
    }
}

impl Drop for ShelfFlight {
    fn drop(&mut self) {
        self.finish();
    }
}
