//! Section 2: events between CubeCL's stream and one of our own, both ways.
use std::time::{Duration, Instant};

use burn::tensor::{DType, Int, Tensor};
use cudarc::driver::{result, sys};

use crate::lab::{Lab, Outcome, burn, count, cube, differs, growing, part, read, step};
use crate::route::{Event, Own, Resolved, RouteError, because, copy};

/// Which of the two events are used. Without one the section must see wrong numbers, or it could see none at all.
#[derive(Clone, Copy)]
struct Events {
    there: bool,
    back: bool,
}

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("events.first_steps", || first_steps(lab));
    part("events.comparing", || comparing(lab));
    let both_ways = |there, back| {
        let name = format!("events there {there}, back {back}");
        let most = if there && back { 10_000 } else { 1000 };
        growing(&name, most, |count| {
            rounds(lab, count, Events { there, back })
        })
    };
    part("events.both", || both_ways(true, true));
    part("events.overlap", || overlap(lab));
    part("events.host", || host(lab));
    // Last: these are wrong on purpose, and may write over memory of this process's tensors.
    part("events.none_there", || both_ways(false, true));
    part("events.none_back", || both_ways(true, false));
    Ok(())
}

/// What it costs to find out on the device whether numbers differ, by Burn's `max` and by its sum.
fn comparing(lab: &Lab) -> Outcome {
    let numbers = lab.random([1 << 20], DType::F32);
    let max = lab.ms(1, 3, || drop(numbers.clone().abs().max()));
    let sum = lab.ms(1, 3, || drop(differs(numbers.clone(), numbers.clone())));
    println!("RESULT events comparing 2^20 numbers: by max {max:.3} ms, by a sum {sum:.3} ms");
    Ok(())
}

/// Each call to the driver that the rounds make, alone and waited for, with a line before and after it.
pub fn first_steps(lab: &Lab) -> Outcome {
    const SIZE: usize = 1 << 10;
    let own = Own::new()?;
    step("a stream of our own is there");
    let (ready, done) = (Event::new()?, Event::new()?);
    step("events are there");
    let out = lab.empty([SIZE], DType::F32);
    let (pointer, theirs) = lab
        .route
        .enqueue_now(&[], &[&out], |at| Ok((at.writes[0], at.stream as usize)))?;
    step("pointer and stream looked up");
    let theirs = theirs as sys::CUstream;
    let wait = |stream, whose: &str| {
        // SAFETY: the stream lives as long as the process.
        let waited = unsafe { result::stream::synchronize(stream) };
        step(format_args!("waited for {whose}: {waited:?}"));
        waited.map_err(|e| because("wait for a stream", e))
    };
    wait(theirs, "CubeCL's stream")?;
    let fill = |number: f32| {
        // SAFETY: the buffer has `SIZE` numbers of 4 bytes and lives until it is read; no other is made before.
        let filled =
            unsafe { sys::cuMemsetD32Async(pointer, number.to_bits(), SIZE, own.raw()) }.result();
        step(format_args!("fill on our stream: {filled:?}"));
        filled.map_err(|e| because("fill", e))
    };
    fill(1.0)?;
    wait(own.raw(), "our stream")?;
    ready.record(own.raw())?;
    step("event recorded on our stream");
    ready.wait()?;
    step("event waited for by the host");
    ready.record(theirs)?;
    step("event recorded on CubeCL's stream");
    ready.hold(own.raw())?;
    step("our stream waits for it");
    fill(2.0)?;
    done.record(own.raw())?;
    done.hold(theirs)?;
    step("CubeCL's stream waits for ours");
    wait(own.raw(), "our stream")?;
    wait(theirs, "CubeCL's stream")?;
    let numbers = read(burn::<1>(out));
    step("read");
    let wrong = numbers.iter().filter(|&&number| number != 2.0).count();
    println!("RESULT events first steps: {wrong} of {SIZE} numbers wrong");
    Ok(())
}

/// A number is written on CubeCL's stream, moved on ours, and read by Burn on CubeCL's; each round another number. The
/// host waits once, at the end.
fn rounds(
    lab: &Lab,
    rounds: usize,
    events: Events,
) -> Result<Duration, Box<dyn std::error::Error>> {
    const SIZE: usize = 1 << 20;
    let own = Own::new()?;
    let (ready, done) = (
        std::sync::Arc::new(Event::new()?),
        std::sync::Arc::new(Event::new()?),
    );
    let zeros = Tensor::<1>::zeros([SIZE], &lab.device);
    // Longer than the host needs for a round, so that the device falls behind.
    let slow = lab.random([128 << 20], DType::F32);
    let mut wrong = Tensor::<1, Int>::zeros([1], &lab.device);
    lab.sync();
    let begin = Instant::now();
    for round in 1..=rounds {
        // Work before, so that the number is not there yet when our stream is asked to move it.
        let delay = slow.clone() * 1.5;
        let value = zeros.clone() + round as f32;
        let out = lab.empty([SIZE], DType::F32);
        let (ready, done) = (ready.clone(), done.clone());
        lab.route.enqueue(&[&cube(&value)], &[&out], move |at| {
            move_on_ours(at, own, SIZE, round as f32, events, &ready, &done)
        });
        wrong = wrong + differs(burn::<1>(out), value);
        drop(delay);
        if round % 1000 == 0 {
            step(format_args!("{round} rounds handed in"));
        }
    }
    let host = begin.elapsed();
    let wrong = count(wrong);
    let all = begin.elapsed();
    println!(
        "RESULT events there {} back {}: wrong in {wrong} of {rounds} rounds; host {:.1} us a round, all {:.1} us",
        events.there,
        events.back,
        host.as_secs_f64() * 1e6 / rounds as f64,
        all.as_secs_f64() * 1e6 / rounds as f64
    );
    Ok(all)
}

/// Fills the first half of the output with `number`, and then copies the second half from the input, on our stream.
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
        step(format_args!("a closure is in the queue, flushed {flushed}"));
        while !recorded.load(Ordering::Acquire) && begin.elapsed().as_secs() < 2 {
            std::thread::yield_now();
        }
        let in_time = recorded.load(Ordering::Acquire);
        let taken = begin.elapsed().as_secs_f64() * 1e6;
        if !in_time {
            println!("RESULT events host, flushed {flushed}: not run within 2 s");
            lab.sync();
            continue;
        }
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
    step("overlap: compute alone");
    let alone = lab.ms(1, 3, compute);
    step("overlap: copies alone");
    let copies = lab.ms(1, 3, || {
        start();
        finish();
    });
    step("overlap: both");
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
