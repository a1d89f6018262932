//! Section 4: ranks that share the device, each a thread with a stream of its own, without unsafe code.
//!
//! A rank stages what it gives in fresh memory and hands the tensor over on the host. A reader's launches make its stream
//! wait for the owner's. CubeCL decides whether to wait by when the memory was allocated, not by when it was written: a
//! reader that has waited for the owner's stream between the two does not wait again. So a rank also hands over a mark,
//! memory that it allocated after it had launched the writes, and a reader launches something on the mark first.
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use burn::tensor::{DType, Int, Tensor};
use cubecl_environment::stream::StreamId;

use crate::kernels::{overwrite, sum_in_order};
use crate::lab::{Lab, Outcome, burn, count, cube, differs, part, read};
use crate::route::used_bytes;

const DIM: usize = 768;

/// Numbers in each unit of a GPT of 12 layers x 768 with a vocabulary of 32768.
fn units() -> Vec<usize> {
    let mut units = vec![12 * DIM * DIM; 12];
    units.extend([32768 * DIM; 2]);
    units
}

/// What ranks hand over to each other.
struct Round {
    given: Vec<Mutex<Vec<Tensor<1>>>>,
    barrier: Barrier,
}

impl Round {
    fn new(ranks: usize) -> Self {
        Self {
            given: (0..ranks).map(|_| Mutex::default()).collect(),
            barrier: Barrier::new(ranks),
        }
    }

    /// Gives `own` and takes what every rank gave, in rank order.
    fn exchange(&self, rank: usize, own: Tensor<1>, marked: bool, lab: &Lab) -> Vec<Tensor<1>> {
        let mut give = vec![own];
        if marked {
            give.push(burn(lab.empty([1], DType::F32)));
        }
        *self.given[rank].lock().expect("not poisoned") = give;
        self.barrier.wait();
        let all: Vec<Vec<Tensor<1>>> = self
            .given
            .iter()
            .map(|given| given.lock().expect("not poisoned").clone())
            .collect();
        self.barrier.wait();
        self.given[rank].lock().expect("not poisoned").clear();
        all.into_iter()
            .enumerate()
            .map(|(owner, mut given)| {
                if owner != rank
                    && let Some(mark) = given.get(1)
                {
                    drop(mark.clone() * 1.0);
                }
                given.swap_remove(0)
            })
            .collect()
    }
}

/// How a run of rounds goes.
#[derive(Clone, Copy, Debug)]
struct Plan {
    ranks: usize,
    rounds: usize,
    marked: bool,
    /// Whether slices are summed by one kernel, or by a chain of additions.
    kernel: bool,
    /// Whether each number is compared with what it must be.
    checked: bool,
}

/// Runs the section.
pub fn run(lab: &Lab) -> Outcome {
    part("shared.cursor", || cursor(lab));
    part("shared.sums", || sums(lab));
    let plan = Plan {
        ranks: 2,
        rounds: 300,
        marked: true,
        kernel: true,
        checked: true,
    };
    for (name, plan) in [
        ("shared.two_checked", plan),
        (
            "shared.two_timed",
            Plan {
                checked: false,
                rounds: 60,
                ..plan
            },
        ),
        (
            "shared.two_timed_chain",
            Plan {
                checked: false,
                rounds: 60,
                kernel: false,
                ..plan
            },
        ),
        (
            "shared.four_checked",
            Plan {
                ranks: 4,
                rounds: 100,
                ..plan
            },
        ),
        (
            "shared.four_timed",
            Plan {
                ranks: 4,
                rounds: 40,
                checked: false,
                ..plan
            },
        ),
        (
            "shared.two_unmarked",
            Plan {
                marked: false,
                rounds: 100,
                ..plan
            },
        ),
        (
            "shared.one_timed",
            Plan {
                ranks: 1,
                rounds: 60,
                checked: false,
                kernel: false,
                ..plan
            },
        ),
    ] {
        part(name, || rounds(lab, plan));
        lab.device.memory_cleanup();
    }
    part("shared.stress_unmarked", || stress(lab, false));
    part("shared.stress_marked", || stress(lab, true));
    Ok(())
}

/// Whether CubeCL waits for a write that came after the reader last waited for the owner's stream, and whether a mark
/// makes it wait. One thread plays both, so that nothing depends on luck.
fn cursor(lab: &Lab) -> Outcome {
    const SIZE: usize = 1 << 20;
    for marked in [false, true, false, true] {
        let (owner, reader) = (StreamId::allocate(), StreamId::allocate());
        let sixes = owner.executes(|| cube(&(Tensor::<1>::zeros([SIZE], &lab.device) + 6.0)));
        let earlier = owner.executes(|| Tensor::<1>::zeros([SIZE], &lab.device) + 1.0);
        let long = owner.executes(|| lab.random([4096, 4096], DType::F32));
        let fresh = owner.executes(|| lab.empty([SIZE], DType::F32));
        owner.executes(|| overwrite(lab, &cube(&earlier), &fresh));
        owner.executes(|| drop(long.clone().matmul(long.clone())));
        // Both streams have compiled and run everything once.
        reader.executes(|| drop(read(earlier.clone() * 1.0)));
        owner.executes(|| lab.sync());

        let fresh = owner.executes(|| lab.empty([SIZE], DType::F32));
        // The reader waits for the owner's stream after the allocation and before the write.
        let between = owner.executes(|| earlier.clone() + 1.0);
        let early = reader.executes(|| between * 1.0);
        owner.executes(|| (0..20).for_each(|_| drop(long.clone().matmul(long.clone()))));
        owner.executes(|| overwrite(lab, &sixes, &fresh));
        if marked {
            let mark = owner.executes(|| burn::<1>(lab.empty([1], DType::F32)));
            reader.executes(|| drop(mark * 1.0));
        }
        let got = reader.executes(|| read(burn::<1>(fresh.clone()) * 1.0));
        let wrong = got.iter().filter(|&&v| v != 6.0).count();
        println!("RESULT shared cursor, marked {marked}: {wrong} of {SIZE} numbers wrong");
        drop(early);
    }
    Ok(())
}

/// One kernel that sums in rank order against a chain of additions: bits and time.
fn sums(lab: &Lab) -> Outcome {
    for ranks in [2usize, 4] {
        for unit in [12 * DIM * DIM, 32768 * DIM] {
            let length = unit / ranks;
            let peers: Vec<Tensor<1>> =
                (0..ranks).map(|_| lab.random([unit], DType::F32)).collect();
            let cubes: Vec<_> = peers.iter().map(cube).collect();
            let from = length * (ranks - 1);
            let kernel = || burn::<1>(sum_in_order(lab, &cubes, from, length));
            let chain = || {
                let slices = peers
                    .iter()
                    .map(|peer| peer.clone().slice([from..from + length]));
                slices.reduce(|sum, next| sum + next).expect("ranks")
            };
            let differ = count(kernel().not_equal(chain()).int().sum());
            let (fast, slow) = (
                lab.ms(3, 20, || drop(kernel())),
                lab.ms(3, 20, || drop(chain())),
            );
            let bytes = ((ranks + 1) * length * 4) as f64;
            println!(
                "RESULT shared sum of {ranks} x {length}: {differ} differ; kernel {fast:.3} ms ({:.0} GB/s), chain {slow:.3} ms",
                bytes / fast / 1e6
            );
        }
    }
    let (from, to) = (
        lab.random([1 << 28], DType::F32),
        lab.empty([1 << 28], DType::F32),
    );
    let ms = lab.ms(2, 10, || overwrite(lab, &cube(&from), &to));
    println!(
        "RESULT shared copy by a kernel of 1 GiB {:.0} GB/s read and written",
        (2u64 << 30) as f64 / ms / 1e6
    );
    Ok(())
}

fn rounds(lab: &Lab, plan: Plan) -> Outcome {
    let round = Arc::new(Round::new(plan.ranks));
    let ends: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..plan.ranks)
            .map(|rank| {
                let round = round.clone();
                scope.spawn(move || {
                    lab.route.bind().expect("the context");
                    one_rank(lab, plan, rank, &round)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank ended"))
            .collect()
    });
    let wrong: i64 = ends.iter().map(|end| end.wrong).sum();
    // Staged once, gathered by every rank, a gradient made by every rank, its slices read by their owners.
    let whole = units().iter().sum::<usize>() as f64 * 4.0;
    let n = plan.ranks as f64;
    let bytes = 2.0 * whole + n * 2.0 * whole + n * 2.0 * whole + (n + 1.0) * whole;
    println!(
        "RESULT shared {plan:?}: {} ms a round (host {:.2}), {:.2} GB moved, so {:.0} GB/s; memory {}",
        format_args!("{:.2}", ends[0].ms),
        ends[0].host_ms,
        bytes / 1e9,
        bytes / ends[0].ms / 1e6,
        ends[0].memory
    );
    if plan.checked {
        println!(
            "RESULT shared {} ranks, marked {}: {wrong} numbers wrong in {} rounds",
            plan.ranks, plan.marked, plan.rounds
        );
    }
    Ok(())
}

struct End {
    wrong: i64,
    ms: f64,
    host_ms: f64,
    memory: String,
}

fn one_rank(lab: &Lab, plan: Plan, rank: usize, round: &Round) -> End {
    let units = units();
    // Shards of every rank, so that this rank can say what it must get. Only the own one is given.
    let shards: Vec<Vec<Tensor<1>>> = units
        .iter()
        .enumerate()
        .map(|(u, &unit)| {
            (0..plan.ranks)
                .map(|owner| shard(lab, unit / plan.ranks, u, owner))
                .collect()
        })
        .collect();
    let input = lab.random([64, DIM], DType::F32);
    let mut wrong = Tensor::<1, Int>::zeros([1], &lab.device);
    let mut memory = String::new();
    let (mut begin, mut host, mut timed) = (Instant::now(), std::time::Duration::ZERO, 0);
    const WARM: usize = 3;
    for number in 0..plan.rounds {
        if number == WARM {
            lab.sync();
            round.barrier.wait();
            (begin, timed) = (Instant::now(), plan.rounds - WARM);
        }
        for (own, &unit) in shards.iter().zip(&units) {
            let gathered = Tensor::cat(
                round.exchange(rank, own[rank].clone() + number as f32, plan.marked, lab),
                0,
            );
            drop(
                input
                    .clone()
                    .matmul(gathered.clone().reshape([DIM, unit / DIM])),
            );
            let gradients =
                round.exchange(rank, gathered.clone() * (rank + 1) as f32, plan.marked, lab);
            let sum = reduced(lab, plan, rank, &gradients, unit / plan.ranks);
            if plan.checked {
                let must = Tensor::cat(
                    own.iter()
                        .map(|shard| shard.clone() + number as f32)
                        .collect(),
                    0,
                );
                let slice = must
                    .clone()
                    .slice([rank * (unit / plan.ranks)..(rank + 1) * (unit / plan.ranks)]);
                let must_sum = (0..plan.ranks)
                    .map(|r| slice.clone() * (r + 1) as f32)
                    .reduce(|sum, next| sum + next)
                    .expect("ranks");
                wrong = wrong
                    + gathered.not_equal(must).int().sum()
                    + sum.not_equal(must_sum).int().sum();
            }
        }
        if [20, 100, 300].contains(&(number + 1)) {
            let before = Instant::now();
            lab.sync();
            round.barrier.wait();
            if rank == 0 {
                let pools = lab
                    .device
                    .memory_pool_usage()
                    .map_or(0, |usage| usage.bytes_reserved);
                memory += &format!(
                    "[after {}: {} MiB used on the device, {} MiB in this rank's pools] ",
                    number + 1,
                    used_bytes().unwrap_or(0) >> 20,
                    pools >> 20
                );
            }
            round.barrier.wait();
            begin += before.elapsed();
        }
    }
    host += begin.elapsed();
    lab.sync();
    round.barrier.wait();
    let each = |time: std::time::Duration| time.as_secs_f64() * 1e3 / timed.max(1) as f64;
    let ms = each(begin.elapsed());
    End {
        wrong: count(wrong),
        ms,
        host_ms: each(host),
        memory,
    }
}

fn shard(lab: &Lab, length: usize, unit: usize, owner: usize) -> Tensor<1> {
    let places = Tensor::<1, Int>::arange(0..length as i64, &lab.device).float();
    places * (1e-3 * (unit + 1) as f32) + owner as f32 * 0.37
}

fn reduced(
    lab: &Lab,
    plan: Plan,
    rank: usize,
    gradients: &[Tensor<1>],
    length: usize,
) -> Tensor<1> {
    let from = rank * length;
    if plan.kernel {
        let peers: Vec<_> = gradients.iter().map(cube).collect();
        return burn(sum_in_order(lab, &peers, from, length));
    }
    let slices = gradients
        .iter()
        .map(|gradient| gradient.clone().slice([from..from + length]));
    slices.reduce(|sum, next| sum + next).expect("ranks")
}

/// Runs many small exchanges while the owner's stream is busy, so that a missing wait causes wrong numbers.
fn stress(lab: &Lab, marked: bool) -> Outcome {
    const ROUNDS: usize = 3000;
    const SIZE: usize = 1 << 16;
    let round = Arc::new(Round::new(2));
    let wrong: Vec<i64> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let round = round.clone();
                scope.spawn(move || {
                    let zeros = Tensor::<1>::zeros([SIZE], &lab.device);
                    let slow = lab.random([32 << 20], DType::F32);
                    let mut wrong = Tensor::<1, Int>::zeros([1], &lab.device);
                    for number in 1..=ROUNDS {
                        drop(slow.clone() * 1.5);
                        let own = zeros.clone() + (number * 2 + rank) as f32;
                        let all = round.exchange(rank, own, marked, lab);
                        let must = zeros.clone() + (number * 2 + 1 - rank) as f32;
                        wrong = wrong + differs(all[1 - rank].clone(), must);
                    }
                    count(wrong)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank ended"))
            .collect()
    });
    println!("RESULT shared stress, marked {marked}: wrong in {wrong:?} of {ROUNDS} rounds");
    Ok(())
}
