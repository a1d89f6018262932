//! Section 7: what a model that was built on the device leaves behind when it is dropped.
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Tensor};

use crate::lab::{Lab, Outcome, part};
use crate::route::used_bytes;

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("memory.module", || module(lab));
    part("memory.other_thread", || other_thread(lab));
    part("memory.dedicated", || dedicated(lab));
    Ok(())
}

fn mib() -> u64 {
    used_bytes().unwrap_or(0) >> 20
}

fn pools(lab: &Lab) -> String {
    lab.device
        .memory_pool_usage()
        .map_or_else(String::new, |u| {
            format!(
                "{} MiB in use, {} MiB reserved",
                u.bytes_in_use >> 20,
                u.bytes_reserved >> 20
            )
        })
}

/// 16 layers of 64 MiB.
fn build(lab: &Lab) -> Vec<Linear> {
    let layers: Vec<Linear> = (0..16)
        .map(|_| {
            LinearConfig::new(4096, 4096)
                .with_bias(false)
                .init(&lab.device)
        })
        .collect();
    // Parameters are made when they are first looked at.
    layers.iter().for_each(|layer| drop(layer.weight.val()));
    lab.sync();
    layers
}

fn module(lab: &Lab) -> Outcome {
    drop(LinearConfig::new(64, 64).init(&lab.device).weight.val());
    lab.sync();
    let start = mib();
    for cleaned in [false, true] {
        let layers = build(lab);
        let built = mib();
        drop(layers);
        lab.sync();
        let dropped = mib();
        // Some ordinary work, in case memory is returned at the next turn.
        (0..50).for_each(|_| drop(Tensor::<1>::zeros([1 << 20], &lab.device) + 1.0));
        lab.sync();
        let worked = mib();
        if cleaned {
            lab.device.memory_cleanup();
            lab.sync();
        }
        println!(
            "RESULT memory of 1 GiB of layers: before {start} MiB, built {built}, dropped {dropped}, after other work {worked}, {} {}; {}",
            if cleaned { "cleaned" } else { "not cleaned" },
            mib(),
            pools(lab)
        );
    }
    Ok(())
}

/// Memory that a thread's stream took: is it returned when the thread has ended?
fn other_thread(lab: &Lab) -> Outcome {
    let before = mib();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let kept = build(lab);
            println!(
                "RESULT memory another thread: before {before} MiB, built {}",
                mib()
            );
            drop(kept);
            lab.sync();
        });
    });
    let ended = mib();
    lab.device.memory_cleanup();
    lab.sync();
    println!(
        "RESULT memory another thread: ended {ended} MiB, cleaned by this one {}",
        mib()
    );
    Ok(())
}

/// Allocations of their own, outside the pools.
fn dedicated(lab: &Lab) -> Outcome {
    let before = mib();
    let kept = lab
        .client
        .memory_dedicated_allocation((), |()| lab.empty([512 << 18], DType::F32));
    lab.sync();
    let there = mib();
    let mutable = kept.handle.can_mut();
    let second = kept.handle.clone();
    let shared = kept.handle.can_mut();
    drop((kept, second));
    lab.sync();
    let dropped = mib();
    drop(Tensor::<1>::zeros([1], &lab.device) + 1.0);
    lab.sync();
    println!(
        "RESULT memory dedicated 512 MiB: before {before} MiB, there {there}, dropped {dropped}, after one more operation {}; may be written alone {mutable}, with a second handle {shared}",
        mib()
    );
    Ok(())
}
