//! An engine of one's own: ranks that are threads lay their sources on a shelf, and take what they need from it.
//!
//! It moves the bytes of every operation itself. An engine that replaces one kind of operation, such as the all-gathers
//! of a sharded module, passes the others on in `start`: `self.inner.start(request)`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_fsdp_collectives::engine::*;
use burn_fsdp_collectives::{Buffer, Operation, OperationKind, Source};

/// The sources of one operation, by rank of the group.
#[derive(Debug, Default)]
pub struct Shelf {
    sources: Vec<Mutex<Option<Arc<[Source]>>>>,
    num_done: AtomicUsize,
}

/// The shelves of all operations, by the numbers of their groups and their own. All ranks share them.
pub type Shelves = Arc<Mutex<HashMap<(u64, u64), Arc<Shelf>>>>;

/// A rank's end of a group whose bytes lie on shelves. `inner` carries the claims.
#[derive(Debug)]
pub struct ShelfEngine {
    inner: Box<dyn Engine>,
    group: Subgroup,
    shelves: Shelves,
}

impl ShelfEngine {
    /// Returns the end of a rank, as `ProcessGroup::on_engine` asks for it.
    pub fn end(inner: Box<dyn Engine>, group: &Subgroup, shelves: &Shelves) -> Box<dyn Engine> {
        let (group, shelves) = (group.clone(), shelves.clone());
        Box::new(Self { inner, group, shelves })
    }
}

impl Messages for ShelfEngine {
    fn control(&self) -> &Arc<Control> {
        self.inner.control()
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Box<dyn Meeting> {
        self.inner.post(operation, claim)
    }
}

impl Engine for ShelfEngine {
    fn name(&self) -> &'static str {
        "shelf"
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let (size, key) = (self.group.members.len(), (self.group.number, request.operation.sequence));
        let sources = || (0..size).map(|_| Mutex::default()).collect();
        let new = || Arc::new(Shelf { sources: sources(), ..Shelf::default() });
        let shelf = self.shelves.lock().unwrap().entry(key).or_insert_with(new).clone();
        *shelf.sources[self.group.rank].lock().unwrap() = Some(request.sources.into());
        // Posted afterwards, so a rank that has all claims finds all sources.
        let meeting = self.inner.post(&request.operation, request.claim);
        let (control, shelves) = (self.control().clone(), self.shelves.clone());
        let (rank, into, findings) = (self.group.rank, request.into, Findings::default());
        Box::new(ShelfFlight { meeting, control, shelves, key, shelf, rank, into, findings, is_done: false })
    }

    fn split(&self, group: Subgroup) -> Box<dyn Engine> {
        Self::end(self.inner.split(group.clone()), &group, &self.shelves)
    }
}

/// A rank's part in one operation.
struct ShelfFlight {
    meeting: Box<dyn Meeting>,
    control: Arc<Control>,
    shelves: Shelves,
    key: (u64, u64),
    shelf: Arc<Shelf>,
    rank: usize,
    into: Vec<Buffer>,
    findings: Findings,
    is_done: bool,
}

impl ShelfFlight {
    /// Fills a buffer along the routes of its part.
    fn fill(&mut self, part: usize, sources: &[Arc<[Source]>], out: &mut [u8]) {
        let signature = self.claim(self.rank).signature.clone();
        let Some(reduction) = &signature.reduction else {
            for (from, sources) in sources.iter().enumerate() {
                if let Some(Route { given, placed }) = signature.routes(from, self.rank).into_iter().nth(part) {
                    copy(&sources[part].as_bytes()[given], &mut out[placed]);
                }
            }
            return;
        };
        let extent = &signature.extents[part];
        let size = reduction.output_of(extent.element).size();
        let is_whole = signature.kind == OperationKind::AllReduce;
        for to in (0..sources.len()).filter(|to| is_whole || *to == self.rank) {
            let slice = extent.partition.range(to);
            let place = if is_whole { slice.start * size..slice.end * size } else { 0..out.len() };
            let given = |from: usize| signature.routes(from, to)[part].given.clone();
            let addend = |from: usize| &sources[from][part].as_bytes()[given(from)];
            let addends: Vec<_> = (0..sources.len()).map(addend).collect();
            for (from, addend) in addends.iter().enumerate() {
                let told = self.claim(from).checks.told_to(to, signature.extents.len());
                if told.is_some_and(|told| told[part] != checksum(addend)) {
                    self.findings.altered.get_or_insert(AlteredPart::on_its_way(from, part));
                }
            }
            reduce(reduction, extent.element, &addends, &mut out[place]);
        }
    }

    /// Marks this rank as one that reads nothing more. The last rank clears the shelf.
    fn finish(&mut self) {
        if std::mem::replace(&mut self.is_done, true) {
            return;
        }
        if self.control.failure().is_some() {
            *self.shelf.sources[self.rank].lock().unwrap() = None;
        }
        let size = self.shelf.sources.len();
        if self.shelf.num_done.fetch_add(1, Ordering::AcqRel) + 1 == size {
            self.shelves.lock().unwrap().remove(&self.key);
            self.shelf.sources.iter().for_each(|sources| *sources.lock().unwrap() = None);
            self.shelf.num_done.fetch_add(1, Ordering::AcqRel);
        }
        self.control.ring();
    }
}

impl Meeting for ShelfFlight {
    fn is_complete(&self) -> bool {
        self.meeting.is_complete()
    }

    fn absent(&self) -> Vec<usize> {
        self.meeting.absent()
    }

    fn claim(&self, rank: usize) -> &Claim {
        self.meeting.claim(rank)
    }
}

impl Flight for ShelfFlight {
    fn is_there(&self, awaited: Awaited) -> bool {
        // One more than the ranks: the shelf is cleared.
        awaited == Awaited::Result || self.shelf.num_done.load(Ordering::Acquire) > self.shelf.sources.len()
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        let is_open = |rank: &usize| self.shelf.sources[*rank].lock().unwrap().is_some();
        (0..self.shelf.sources.len()).filter(is_open).collect()
    }

    fn receive(&mut self) -> Result<Completion, Withdrawn> {
        let sources = self.shelf.sources.iter().map(|sources| sources.lock().unwrap().clone());
        let sources: Vec<_> = sources.collect::<Option<_>>().ok_or(Withdrawn)?;
        let mut buffers = std::mem::take(&mut self.into);
        for (part, buffer) in buffers.iter_mut().enumerate() {
            self.fill(part, &sources, buffer.as_mut());
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
