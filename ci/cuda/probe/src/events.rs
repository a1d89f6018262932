//! Section 2: events between CubeCL's stream and one of our own, both ways.
use std::time::Instant;

use burn::tensor::{DType, Tensor};
use cudarc::driver::sys;

use crate::lab::{Lab, Outcome, burn, cube, part, read};
use crate::route::{Event, Own, Resolved, RouteError, because, copy};

/// Which of the two events are used. Without one the section must see wrong numbers, or it could see none at all.
#[derive(Clone, Copy)]
struct Events {
    there: bool,
    back: bool,
}

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("events.both", || {
        rounds(
            lab,
            10_000,
            Events {
                there: true,
                back: true,
            },
        )
    });
    part("events.overlap", || overlap(lab));
    part("events.host", || host(lab));
    // Last: these are wrong on purpose, and may write over memory of this process's tensors.
    part("events.none_there", || {
        rounds(
            lab,
            1000,
            Events {
                there: false,
                back: true,
            },
        )
    });
    part("events.none_back", || {
        rounds(
            lab,
            1000,
            Events {
                there: true,
                back: false,
            },
        )
    });
    Ok(())
}

/// A number is written on CubeCL's stream, moved on ours, and read by Burn on CubeCL's; each round another number. The
/// host waits once, at the end.
fn rounds(lab: &Lab, count: usize, events: Events) -> Outcome {
    const SIZE: usize = 1 << 20;
    let own = Own::new()?;
    let (ready, done) = (
        std::sync::Arc::new(Event::new()?),
        std::sync::Arc::new(Event::new()?),
    );
    let zeros = Tensor::<1>::zeros([SIZE], &lab.device);
    let slow = lab.random([8 << 20], DType::F32);
    let mut wrong = Tensor::<1>::zeros([1], &lab.device);
    lab.sync();
    let begin = Instant::now();
    for round in 1..=count {
        // Work before, so that the number is not there yet when our stream is asked to move it.
        let delay = slow.clone() * 1.5;
        let value = zeros.clone() + round as f32;
        let out = lab.empty([SIZE], DType::F32);
        let (ready, done) = (ready.clone(), done.clone());
        lab.route.enqueue(&[&cube(&value)], &[&out], move |at| {
            move_on_ours(at, own, SIZE, round as f32, events, &ready, &done)
        });
        let off = (burn::<1>(out) - value).abs().max();
        wrong = wrong + off.sign();
        drop(delay);
    }
    let host = begin.elapsed();
    let wrong = read(wrong)[0];
    println!(
        "RESULT events there {} back {}: wrong in {wrong} of {count} rounds; host {:.1} us a round, all {:.1} us",
        events.there,
        events.back,
        host.as_secs_f64() * 1e6 / count as f64,
        begin.elapsed().as_secs_f64() * 1e6 / count as f64
    );
    Ok(())
}

/// One half is copied, the other filled with the same number, in that order on our stream.
fn move_on_ours(
    at: &Resolved<'_>,
    own: Own,
    size: usize,
    number: f32,
    events: Events,
    ready: &Event,
    done: &Event,
) -> Result<(), RouteError> {
    if events.there {
        ready.record(at.stream)?;
        ready.hold(own.raw())?;
    }
    let half = 2 * size as u64;
    // SAFETY: both buffers have `size` numbers of 4 bytes; CubeCL's stream waits for `done` before either is used again.
    unsafe {
        sys::cuMemsetD32Async(at.writes[0], number.to_bits(), size / 2, own.raw())
            .result()
            .map_err(|e| because("fill", e))?;
        copy(
            at.writes[0] + half,
            at.reads[0] + half,
            half as usize,
            own.raw(),
        )?;
    }
    if events.back {
        done.record(own.raw())?;
        done.hold(at.stream)?;
    }
    Ok(())
}

/// How soon the server takes what is in its queue, with and without a flush; and a host that waits for one event.
fn host(lab: &Lab) -> Outcome {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let done = Arc::new(Event::new()?);
    let a = lab.random([4096, 4096], DType::F32);
    let one = lab.empty([1], DType::F32);
    for flushed in [false, true, false, true] {
        drop(a.clone().matmul(a.clone()));
        lab.sync();
        drop(a.clone().matmul(a.clone()));
        let recorded = Arc::new(AtomicBool::new(false));
        let begin = Instant::now();
        let (event, flag) = (done.clone(), recorded.clone());
        lab.route.enqueue(&[], &[&one], move |at| {
            event.record(at.stream)?;
            flag.store(true, Ordering::Release);
            Ok(())
        });
        if flushed {
            lab.route.flush();
        }
        while !recorded.load(Ordering::Acquire) && begin.elapsed().as_secs() < 2 {
            std::thread::yield_now();
        }
        let taken = begin.elapsed().as_secs_f64() * 1e6;
        let early = done.is_done();
        done.wait()?;
        println!(
            "RESULT events host, flushed {flushed}: the server ran the closure after {taken:.0} us (done then {early}), the event came after {:.0} us",
            begin.elapsed().as_secs_f64() * 1e6
        );
    }
    Ok(())
}

/// A long copy on our stream while CubeCL's computes: how long do both take, and what is each alone?
fn overlap(lab: &Lab) -> Outcome {
    let bytes = 1usize << 30;
    let (from, to) = (
        lab.empty([bytes / 4], DType::F32),
        lab.empty([bytes / 4], DType::F32),
    );
    let own = Own::new()?;
    let (ready, done) = (
        std::sync::Arc::new(Event::new()?),
        std::sync::Arc::new(Event::new()?),
    );
    let a = lab.random([2048, 2048], DType::F32);
    let compute = || (0..20).for_each(|_| drop(a.clone().matmul(a.clone())));
    let start = || {
        let (ready, done) = (ready.clone(), done.clone());
        lab.route.enqueue(&[&from], &[&to], move |at| {
            ready.record(at.stream)?;
            ready.hold(own.raw())?;
            for _ in 0..8 {
                // SAFETY: both have `bytes` and outlive the section.
                unsafe { copy(at.writes[0], at.reads[0], bytes, own.raw())? };
            }
            done.record(own.raw())
        });
    };
    let finish = || {
        let done = done.clone();
        lab.route
            .enqueue(&[&from], &[&to], move |at| done.hold(at.stream));
    };
    let alone = lab.ms(1, 3, compute);
    let copies = lab.ms(1, 3, || {
        start();
        finish();
    });
    let both = lab.ms(1, 3, || {
        start();
        compute();
        finish();
    });
    println!(
        "RESULT events overlap: compute alone {alone:.2} ms, copies alone {copies:.2} ms, both {both:.2} ms"
    );
    println!(
        "RESULT events copy on our own stream {:.0} GB/s read and written",
        16.0 * bytes as f64 / copies / 1e6
    );
    Ok(())
}
