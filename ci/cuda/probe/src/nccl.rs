//! Section 3: NCCL on a stream of our own and CubeCL's pointers, with one rank.
use std::time::{Duration, Instant};

use burn::tensor::{DType, Int, Tensor};
use cudarc::nccl::{result, sys};

use crate::events::first_steps;
use crate::lab::{Lab, Outcome, burn, count, cube, differs, growing, part, step};
use crate::route::{Event, Own, RouteError, because};

/// A communicator; the pointer is NCCL's.
#[derive(Clone, Copy)]
struct Comm(sys::ncclComm_t);

// SAFETY: NCCL allows a communicator in any thread, one call at a time; `abort` may come beside others.
unsafe impl Send for Comm {}

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    // SAFETY: looks for the library by its names and loads it.
    let found = unsafe { sys::is_culib_present() };
    println!(
        "RESULT nccl found {found}, version {:?}",
        found.then(|| result::get_nccl_version().ok()).flatten()
    );
    if !found {
        return Err("no libnccl.so on LD_LIBRARY_PATH; libnccl.so.2 alone is not found".into());
    }
    println!("RESULT nccl loaded from {}", mapped("libnccl"));
    part("nccl.first_steps", || first_steps(lab));
    part("nccl.one_rank", || {
        let comm = alone()?;
        growing("nccl one rank", 2000, |count| one_rank(lab, comm, count))
    });
    part("nccl.nonblocking_and_abort", || abort(lab));
    part("nccl.two_ranks_one_gpu", || two_ranks(lab));
    Ok(())
}

/// The files of a loaded library.
fn mapped(name: &str) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files: Vec<_> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|file| file.contains(name))
        .collect();
    files.dedup();
    files.join(" ")
}

fn alone() -> Result<Comm, RouteError> {
    let id = result::get_uniqueid().map_err(|e| because("ncclGetUniqueId", e.0))?;
    step("NCCL gave an id");
    let mut comm = std::ptr::null_mut();
    // SAFETY: `comm` outlives the call; the context is current on this thread.
    unsafe { result::comm_init_rank(&mut comm, 1, id, 0) }
        .map_err(|e| because("ncclCommInitRank", e.0))?;
    step("a communicator of one rank is there");
    Ok(Comm(comm))
}

/// Gathers and reductions on our stream between events, each round other numbers, no wait of the host.
fn one_rank(lab: &Lab, comm: Comm, rounds: usize) -> Result<Duration, Box<dyn std::error::Error>> {
    const SIZE: usize = 1 << 20;
    let own = Own::new()?;
    let (ready, done) = (
        std::sync::Arc::new(Event::new()?),
        std::sync::Arc::new(Event::new()?),
    );
    let zeros = Tensor::<1>::zeros([SIZE], &lab.device);
    let mut wrong = Tensor::<1, Int>::zeros([1], &lab.device);
    lab.sync();
    let begin = Instant::now();
    for round in 1..=rounds {
        let value = zeros.clone() + round as f32;
        let (gathered, reduced) = (lab.empty([SIZE], DType::F32), lab.empty([SIZE], DType::F32));
        let (ready, done) = (ready.clone(), done.clone());
        lab.route
            .enqueue(&[&cube(&value)], &[&gathered, &reduced], move |at| {
                let comm = comm;
                ready.record(at.stream)?;
                ready.hold(own.raw())?;
                // SAFETY: one rank, so that both results are as long as the source. CubeCL's stream waits for `done`.
                unsafe {
                    let f32s = sys::ncclDataType_t::ncclFloat32;
                    result::all_gather(
                        at.reads[0] as _,
                        at.writes[0] as _,
                        SIZE,
                        f32s,
                        comm.0,
                        own.raw().cast(),
                    )
                    .map_err(|e| because("ncclAllGather", e.0))?;
                    result::reduce_scatter(
                        at.writes[0] as _,
                        at.writes[1] as _,
                        SIZE,
                        f32s,
                        sys::ncclRedOp_t::ncclSum,
                        comm.0,
                        own.raw().cast(),
                    )
                    .map_err(|e| because("ncclReduceScatter", e.0))?;
                }
                done.record(own.raw())?;
                done.hold(at.stream)
            });
        wrong = wrong
            + (differs(burn::<1>(gathered), value.clone()) + differs(burn::<1>(reduced), value))
                .clamp_max(1);
        if round % 1000 == 0 {
            step(format_args!("{round} rounds handed in"));
        }
    }
    let host = begin.elapsed();
    let wrong = count(wrong);
    let all = begin.elapsed();
    println!(
        "RESULT nccl one rank, gather and reduce: wrong in {wrong} of {rounds} rounds; host {:.1} us a round, all {:.1} us",
        host.as_secs_f64() * 1e6 / rounds as f64,
        all.as_secs_f64() * 1e6 / rounds as f64
    );
    Ok(all)
}

/// A communicator formed without blocking, and aborted from another thread while it is idle.
fn abort(lab: &Lab) -> Outcome {
    lab.route.bind()?;
    let id = result::get_uniqueid().map_err(|e| because("ncclGetUniqueId", e.0))?;
    let mut config = config();
    config.blocking = 0;
    let mut comm = std::ptr::null_mut();
    // SAFETY: both outlive the call.
    let begun = unsafe { sys::ncclCommInitRankConfig(&mut comm, 1, id, 0, &mut config) };
    let begin = Instant::now();
    let mut state = begun;
    while state == sys::ncclResult_t::ncclInProgress && begin.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
        // SAFETY: the communicator is being formed, and this is the call that asks how far it is.
        let asked = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
        if asked != sys::ncclResult_t::ncclSuccess {
            return Err(because("ncclCommGetAsyncError", asked).into());
        }
    }
    println!(
        "RESULT nccl formed without blocking: first {begun:?}, then {state:?} after {:.0} ms",
        begin.elapsed().as_secs_f64() * 1e3
    );
    step("formed without blocking, abort is next");
    let comm = Comm(comm);
    let route = lab.route.clone();
    let begin = Instant::now();
    let ended = std::thread::spawn(move || {
        let comm = comm;
        route.bind().expect("the context");
        // SAFETY: nobody uses the communicator afterwards.
        unsafe { sys::ncclCommAbort(comm.0) }
    })
    .join();
    println!(
        "RESULT nccl abort from another thread: {ended:?} after {:.0} ms",
        begin.elapsed().as_secs_f64() * 1e3
    );
    Ok(())
}

/// What `NCCL_CONFIG_INITIALIZER` of NCCL 2.17 says, which newer libraries take too: they read as much as `size` says, and
/// take `INT_MIN` and null for what was left open.
fn config() -> sys::ncclConfig_t {
    // SAFETY: the structure is plain C, integers and pointers, for which zeros are values.
    let mut config = unsafe { std::mem::zeroed::<sys::ncclConfig_t>() };
    config.size = 48;
    config.magic = 0xcafe_beef;
    config.version = 21_700;
    (config.blocking, config.cgaClusterSize, config.splitShare) = (i32::MIN, i32::MIN, i32::MIN);
    (config.minCTAs, config.maxCTAs) = (i32::MIN, i32::MIN);
    config
}

/// Two ranks on one GPU: NCCL's answer.
fn two_ranks(lab: &Lab) -> Outcome {
    let id = result::get_uniqueid().map_err(|e| because("ncclGetUniqueId", e.0))?;
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let route = lab.route.clone();
            std::thread::spawn(move || {
                route.bind().expect("the context");
                let mut comm = std::ptr::null_mut();
                step(format_args!("rank {rank} of two on one GPU is next"));
                // SAFETY: `comm` outlives the call.
                let answer = unsafe { sys::ncclCommInitRank(&mut comm, 2, id, rank) };
                step(format_args!("rank {rank} of two on one GPU: {answer:?}"));
                answer
            })
        })
        .collect();
    for (rank, answer) in ranks.into_iter().enumerate() {
        println!(
            "RESULT nccl two ranks on one GPU, rank {rank}: {:?}",
            answer.join()
        );
    }
    Ok(())
}
