//! Bytes that are not in host memory, on an engine that pretends to have a device.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use burn_fsdp_collectives::engine::{
    Awaited, Claim, Completion, Control, Engine, Fence, Flight, Meeting, Messages, Payload,
    Request, Space, Stopped, Subgroup,
};
use burn_fsdp_collectives::{
    Buffer, Check, ElementType, Error, LaunchConfig, Operation, Part, Partition, ProcessGroup,
    Source, launch,
};

const PRETEND: Space = Space::Device {
    kind: "pretend",
    index: 0,
};

/// Bytes of the pretended device, which the host cannot read.
#[derive(Clone)]
struct OnDevice(Vec<u8>);

impl Payload for OnDevice {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn space(&self) -> Space {
        PRETEND
    }

    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn bytes_of(payload: &dyn Payload) -> &[u8] {
    let on_device = payload.as_any().downcast_ref::<OnDevice>();
    &on_device.expect("it is on the device").0
}

/// A fence that the test lets pass.
#[derive(Debug, Default)]
struct Gate {
    is_open: AtomicBool,
    control: OnceLock<Arc<Control>>,
}

impl Gate {
    /// Lets it pass. A rank may wait for that, so its engine rings.
    fn open(&self) {
        self.is_open.store(true, Ordering::Release);
        self.control.get().expect("there is an engine").ring();
    }
}

impl Fence for Gate {
    fn has_passed(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The sources of all ranks in the only operation that moves bytes.
type Board = Arc<Vec<OnceLock<Vec<Source>>>>;

/// An engine that gathers on the pretended device.
#[derive(Debug)]
struct Pretended {
    inner: Box<dyn Engine>,
    board: Board,
    gate: Arc<Gate>,
    rank: usize,
    /// Where the results are to be found.
    results: Space,
}

struct Enqueued {
    meeting: Arc<dyn Meeting>,
    board: Board,
    gate: Arc<Gate>,
    rank: usize,
    results: Space,
    into: Vec<Buffer>,
}

impl Messages for Pretended {
    fn control(&self) -> &Arc<Control> {
        self.inner.control()
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        self.inner.post(operation, claim)
    }
}

impl Engine for Pretended {
    fn name(&self) -> &'static str {
        "pretended"
    }

    fn takes(&self, space: Space) -> bool {
        space == PRETEND || space == self.results
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        assert!(self.board[self.rank].set(request.sources).is_ok());
        Box::new(Enqueued {
            meeting: self.inner.post(&request.operation, request.claim),
            board: self.board.clone(),
            gate: self.gate.clone(),
            rank: self.rank,
            results: self.results,
            into: request.into,
        })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        self.inner.split(subgroup)
    }
}

impl Flight for Enqueued {
    fn meeting(&self) -> &dyn Meeting {
        &*self.meeting
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        awaited == Awaited::Result || self.gate.has_passed()
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        Vec::new()
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        let signature = &self.meeting.claim(self.rank).signature;
        let mut full = vec![0; self.into[0].len()];
        for (from, sources) in self.board.iter().enumerate() {
            let route = signature.routes(from, self.rank).swap_remove(0);
            let sources = sources.get().expect("all claims are there");
            full[route.placed]
                .copy_from_slice(&bytes_of(sources[0].payload().unwrap())[route.given]);
        }
        let buffers = match self.results {
            Space::Host => std::mem::take(&mut self.into),
            _ => vec![Buffer::arrived(Box::new(OnDevice(full)))],
        };
        let fence = self.gate.clone();
        Ok(Completion::Enqueued { buffers, fence })
    }
}

fn gather(group: &ProcessGroup, space: Space) -> Result<burn_fsdp_collectives::Pending, Error> {
    let partition = Partition::flat(5, group.size())?;
    let shard: Vec<u8> = partition.range(group.rank()).map(|i| 7 * i as u8).collect();
    let source = match space {
        Space::Host => Source::new(shard),
        _ => Source::of(Arc::new(OnDevice(shard))),
    };
    let part = Part::new(source, partition, ElementType::U8);
    group.start_all_gather("x", vec![], vec![part], vec![Buffer::in_space(PRETEND, 5)])
}

/// Runs `body` on three ranks of a group on the pretended device, each with its own fence.
fn on_device<T: Send + 'static>(
    results: Space,
    body: impl Fn(ProcessGroup, Arc<Gate>) -> Result<T, Error> + Send + Sync + 'static,
) -> Vec<Result<T, Error>> {
    let board: Board = Arc::new((0..3).map(|_| OnceLock::new()).collect());
    let run = move |world: ProcessGroup| {
        let gate = Arc::new(Gate::default());
        let group = world.on_engine("device", |inner, group| {
            gate.control.get_or_init(|| inner.control().clone());
            Box::new(Pretended {
                inner,
                board: board.clone(),
                gate: gate.clone(),
                rank: group.rank,
                results,
            })
        })?;
        Ok::<_, Error>(body(group, gate))
    };
    launch(LaunchConfig::new(3), run).unwrap()
}

#[test]
fn a_result_on_a_device_is_handed_out_before_it_is_computed() {
    let seen = on_device(PRETEND, |group, gate| {
        let mut received = gather(&group, PRETEND)?.wait()?;
        let fence = received.fence.take().expect("the work is only enqueued");
        assert!(!fence.has_passed());
        gate.open();
        assert!(fence.has_passed());
        let buffer = received.buffers.swap_remove(0);
        assert_eq!((buffer.len(), buffer.space()), (5, PRETEND));
        assert!(buffer.host().is_none());
        // It can be given in the next operation.
        let source = Source::of(Arc::new(buffer));
        assert_eq!((source.len(), source.space()), (5, PRETEND));
        Ok(bytes_of(source.payload().unwrap()).to_vec())
    });
    for full in seen {
        assert_eq!(full.unwrap(), [0, 7, 14, 21, 28]);
    }
}

#[test]
fn sources_are_released_when_the_device_has_read_them() {
    let seen = on_device(PRETEND, |group, gate| {
        let pending = gather(&group, PRETEND)?;
        if group.rank() != 1 {
            return pending.wait().map(|_| Vec::new());
        }
        let order = Arc::new(Mutex::new(Vec::new()));
        let noted = order.clone();
        let device = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            noted.lock().unwrap().push("passed");
            gate.open();
        });
        pending.wait_released()?;
        order.lock().unwrap().push("released");
        device.join().unwrap();
        Ok(order.lock().unwrap().clone())
    });
    assert_eq!(seen[1].as_ref().unwrap(), &["passed", "released"]);
}

#[test]
fn memory_that_an_engine_does_not_take_is_refused_by_name() {
    let body = |world: ProcessGroup| {
        let refused = gather(&world, PRETEND).map(|_| ()).unwrap_err().to_string();
        // Nobody has heard of the call.
        world.barrier("after it").map(|()| refused)
    };
    for check in [Check::Calls, Check::Agreement] {
        for text in launch(LaunchConfig::new(2).check(check), body).unwrap() {
            let memory = match check {
                Check::Agreement => "in host memory (because ranks compare bytes)",
                _ => "in memory that engine `local` takes",
            };
            let words = format!("parts[0].source should be {memory} but is in pretend:0");
            assert!(text.contains(&words), "{text}");
        }
    }
}

#[test]
fn the_bytes_of_one_call_are_in_one_memory() {
    let seen = on_device(Space::Host, |group, _| {
        gather(&group, Space::Host).map(|_| ())
    });
    for refused in seen {
        let text = refused.unwrap_err().to_string();
        let words = "into[0] should be in host memory (like the other bytes of the call) but is in pretend:0";
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn results_that_never_arrive_are_an_error_of_the_engine() {
    let seen = on_device(Space::Host, |group, _| {
        gather(&group, PRETEND)?.wait().map(|_| ())
    });
    for error in seen {
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("engine `pretended` should have returned 5 bytes in pretend:0"),
            "{text}"
        );
        assert!(text.contains("that never arrived"), "{text}");
    }
}
