//! The contract of every engine, as test cases. A case runs on all ranks of a group at the same time, and each rank
//! checks its own results. The cases do not depend on where the other ranks run.

use std::sync::Arc;
use std::time::Duration;

use burn_fsdp_collectives::{
    CrossPart, ElementType, Error, FullPart, Mesh, OperationKind, Part, Partition, ProcessGroup,
    ProcessMesh, Received, ReduceOp, Reduction, Source,
};
use bytemuck::Pod;
use half::{bf16, f16};

type Outcome = Result<(), Error>;

/// A test case, which every rank of a group runs.
pub type Case = fn(&ProcessGroup) -> Outcome;

/// All cases, with their names. Each case leaves the group as it found it.
pub const CASES: [(&str, Case); 19] = [
    ("exchange", exchange),
    ("barrier", barrier),
    ("all_gather", all_gather),
    ("lists of parts", lists),
    ("notes", notes),
    ("joining", joining),
    ("broadcast", broadcast),
    ("scatter", scatter),
    ("gather", gather),
    ("all_to_all", all_to_all),
    ("reductions", reductions),
    ("scaled reductions", scaled),
    ("large tensors", large),
    ("more bytes than an int counts", huge),
    ("any order of waits", any_order),
    ("discarded operations", discarded),
    ("released memory", released),
    ("groups and meshes", groups),
    ("isolated failures", isolated),
];

const SIZES: [usize; 7] = [12, 7, 5, 3, 2, 1, 0];

fn source<T: Pod>(values: &[T]) -> Source {
    Source::new(bytemuck::cast_slice(values).to_vec())
}

fn values<T: Pod>(received: &Received, part: usize) -> Vec<T> {
    let bytes = received.buffers[part].as_ref().chunks_exact(size_of::<T>());
    bytes.map(bytemuck::pod_read_unaligned).collect()
}

/// Returns values that depend on the rank and the element. Most are inexact in binary.
fn floats(rank: usize, len: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + rank * 101) % 211) as f32 / 7.0 - 11.0;
    (0..len).map(value).collect()
}

fn flat(group: &ProcessGroup, len: usize) -> Partition {
    Partition::flat(len, group.size()).expect("a group has ranks")
}

fn counting(group: &ProcessGroup, len: usize) -> Part {
    let partition = flat(group, len);
    let shard: Vec<_> = partition.range(group.rank()).map(|i| i as f32).collect();
    Part::new(source(&shard), partition, ElementType::F32)
}

fn counted(len: usize) -> Vec<f32> {
    (0..len).map(|i| i as f32).collect()
}

fn gathered(group: &ProcessGroup, label: &str, len: usize) -> Result<Vec<f32>, Error> {
    let into = vec![group.pool().take(len * 4)];
    let received = group.all_gather(label, vec![], vec![counting(group, len)], into)?;
    Ok(values(&received, 0))
}

fn exchange(group: &ProcessGroup) -> Outcome {
    let note = |rank: usize| vec![rank as u8; 3 * rank];
    let heard = group.exchange("who", note(group.rank()))?;
    assert_eq!(heard, (0..group.size()).map(note).collect::<Vec<_>>());
    // More bytes than a transport sends in one eager message.
    let long = |rank: usize| vec![rank as u8; 100_000 + rank];
    let heard = group.exchange("long", long(group.rank()))?;
    assert_eq!(heard, (0..group.size()).map(long).collect::<Vec<_>>());
    Ok(())
}

fn barrier(group: &ProcessGroup) -> Outcome {
    let before = group.counts().of(OperationKind::Barrier).operations;
    (0..200).try_for_each(|_| group.barrier("x"))?;
    let pending: Vec<_> = (0..200)
        .map(|_| group.start_barrier("y"))
        .collect::<Result<_, _>>()?;
    pending.into_iter().try_for_each(|pending| pending.wait())?;
    let counted = group.counts().of(OperationKind::Barrier).operations;
    assert_eq!(counted - before, 400);
    Ok(())
}

fn all_gather(group: &ProcessGroup) -> Outcome {
    for len in SIZES {
        assert_eq!(gathered(group, "x", len)?, counted(len));
    }
    Ok(())
}

fn lists(group: &ProcessGroup) -> Outcome {
    let rows = Partition::rows(&[7, 3], group.size())?;
    let bytes: Vec<u8> = rows.range(group.rank()).map(|i| i as u8).collect();
    let parts = vec![
        counting(group, 10),
        Part::new(source(&bytes), rows, ElementType::U8),
        counting(group, 0),
        counting(group, 2),
    ];
    let into = [40, 21, 0, 8].map(|len| group.pool().take(len)).into();
    let received = group.all_gather("list", vec![], parts, into)?;
    assert_eq!(values::<f32>(&received, 0), counted(10));
    assert_eq!(values::<u8>(&received, 1), (0..21).collect::<Vec<_>>());
    assert_eq!(values::<f32>(&received, 3), counted(2));
    // No parts.
    let received = group.all_gather("empty", vec![], vec![], vec![])?;
    assert!(received.buffers.is_empty());
    Ok(())
}

fn notes(group: &ProcessGroup) -> Outcome {
    let note = |rank: usize| vec![rank as u8; rank];
    let into = vec![group.pool().take(20)];
    let parts = vec![counting(group, 5)];
    let received = group.all_gather("x", note(group.rank()), parts, into)?;
    assert_eq!(
        received.notes,
        (0..group.size()).map(note).collect::<Vec<_>>()
    );
    Ok(())
}

fn joining(group: &ProcessGroup) -> Outcome {
    if group.rank() + 1 == group.size() {
        let joined = group.join_all_gather("x", vec![9], vec![counting(group, 7)])?;
        assert!(joined.wait()?.buffers.is_empty());
        return Ok(());
    }
    assert_eq!(gathered(group, "x", 7)?, counted(7));
    Ok(())
}

fn broadcast(group: &ProcessGroup) -> Outcome {
    for root in 0..group.size() {
        for len in [11, 0] {
            let is_root = group.rank() == root;
            let part = if is_root {
                FullPart::new(source(&floats(root, len)), ElementType::F32)
            } else {
                FullPart::absent(len, ElementType::F32)
            };
            let into = (!is_root).then(|| group.pool().take(4 * len));
            let into = into.into_iter().collect();
            let received = group.broadcast("x", vec![], root, vec![part], into)?;
            if is_root {
                assert!(received.buffers.is_empty())
            } else {
                assert_eq!(values::<f32>(&received, 0), floats(root, len))
            }
        }
    }
    Ok(())
}

fn scatter(group: &ProcessGroup) -> Outcome {
    let root = group.size() / 2;
    for len in SIZES {
        let partition = flat(group, len);
        let part = if group.rank() == root {
            Part::new(source(&floats(root, len)), partition, ElementType::F32)
        } else {
            Part::absent(partition, ElementType::F32)
        };
        let into = vec![group.pool().take(4 * partition.len(group.rank()))];
        let received = group.scatter("x", vec![], root, vec![part], into)?;
        let expected = &floats(root, len)[partition.range(group.rank())];
        assert_eq!(values::<f32>(&received, 0), expected);
    }
    Ok(())
}

fn gather(group: &ProcessGroup) -> Outcome {
    let root = group.size() - 1;
    for len in SIZES {
        let into = (group.rank() == root).then(|| group.pool().take(4 * len));
        let into = into.into_iter().collect();
        let received = group.gather("x", vec![], root, vec![counting(group, len)], into)?;
        if group.rank() == root {
            assert_eq!(values::<f32>(&received, 0), counted(len))
        } else {
            assert!(received.buffers.is_empty())
        }
    }
    Ok(())
}

fn all_to_all(group: &ProcessGroup) -> Outcome {
    let (rank, size) = (group.rank(), group.size());
    // An element of a matrix whose entries are three numbers each.
    let value = |row: usize, column: usize, i: usize| (100 * row + 10 * column + i) as u16;
    for (num_rows, num_columns) in [(8, 12), (7, 5), (5, 2), (1, 9), (0, 4), (3, 0)] {
        let rows = flat(group, num_rows);
        let columns = Partition::rows(&[num_columns, 3], size)?;
        // A rank's range of columns.
        let of = |rank: usize| {
            let range = columns.range(rank);
            range.start / 3..range.end / 3
        };
        let block = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
            rows.flat_map(move |row| columns.clone().map(move |column| (row, column)))
                .flat_map(|(row, column)| (0..3).map(move |i| value(row, column, i)))
                .collect::<Vec<_>>()
        };
        let given: Vec<_> = (0..size)
            .flat_map(|to| block(rows.range(rank), of(to)))
            .collect();
        let expected: Vec<_> = (0..size)
            .flat_map(|from| block(rows.range(from), of(rank)))
            .collect();
        let part = || CrossPart::new(source(&given), rows, columns, ElementType::U16);
        let into = || group.pool().take(2 * expected.len());
        let received = group.all_to_all("x", vec![rank as u8], vec![part()], vec![into()])?;
        assert_eq!(values::<u16>(&received, 0), expected);
        assert_eq!(received.notes.concat(), (0..size as u8).collect::<Vec<_>>());
        let parts = vec![part(), part()];
        let pending = group.start_all_to_all("y", vec![], parts, vec![into(), into()])?;
        group.barrier("between")?;
        let received = pending.wait()?;
        assert_eq!(values::<u16>(&received, 0), expected);
        assert_eq!(values::<u16>(&received, 1), expected);
    }
    Ok(())
}

/// An element type, with conversions from and to `f32`.
trait Element: Pod + PartialEq + std::fmt::Debug {
    const TYPE: ElementType;
    fn of(value: f32) -> Self;
    fn wide(self) -> f32;
}

macro_rules! element {
    ($type:ty, $element:ident, $of:expr, $wide:expr) => {
        impl Element for $type {
            const TYPE: ElementType = ElementType::$element;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn wide(self) -> f32 {
                $wide(self)
            }
        }
    };
}

element!(f32, F32, |x| x, |x| x);
element!(f16, F16, f16::from_f32, f16::to_f32);
element!(bf16, BF16, bf16::from_f32, bf16::to_f32);

/// Computes the full result of reducing the ranks' [`floats`], directly from the definition.
fn reduced<E: Element, O: Element>(ranks: usize, len: usize, by: &Reduction) -> Vec<O> {
    let combine = |a: f32, b: f32| match by.op {
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
        _ => a + b,
    };
    let addends = |rank: usize| {
        let scaled = |x: f32| E::of(x).wide() * by.pre_scale as f32;
        floats(rank, len).into_iter().map(scaled)
    };
    let mut sums: Vec<f32> = addends(0).collect();
    for rank in 1..ranks {
        for (sum, addend) in sums.iter_mut().zip(addends(rank)) {
            *sum = combine(*sum, addend);
        }
    }
    let share = match by.op {
        ReduceOp::Mean => 1.0 / ranks as f64,
        _ => 1.0,
    };
    let result = |sum| O::of(sum * (by.post_scale * share) as f32);
    sums.into_iter().map(result).collect()
}

/// Checks the results of an all-reduce and a reduce-scatter bit by bit.
fn reduce<E: Element, O: Element>(group: &ProcessGroup, len: usize, by: Reduction) -> Outcome {
    let own: Vec<E> = floats(group.rank(), len).into_iter().map(E::of).collect();
    let expected = reduced::<E, O>(group.size(), len, &by);
    let into = vec![group.pool().take(len * size_of::<O>())];
    let part = FullPart::new(source(&own), E::TYPE);
    let received = group.all_reduce("x", vec![], by, vec![part], into)?;
    let result: Vec<O> = values(&received, 0);
    assert_eq!(
        bytemuck::cast_slice::<O, u8>(&result),
        bytemuck::cast_slice::<O, u8>(&expected)
    );

    let partition = flat(group, len);
    let range = partition.range(group.rank());
    let into = vec![group.pool().take(range.len() * size_of::<O>())];
    let part = Part::new(source(&own), partition, E::TYPE);
    let received = group.reduce_scatter("y", vec![], by, vec![part], into)?;
    let result: Vec<O> = values(&received, 0);
    assert_eq!(
        bytemuck::cast_slice::<O, u8>(&result),
        bytemuck::cast_slice::<O, u8>(&expected[range])
    );
    Ok(())
}

fn reductions(group: &ProcessGroup) -> Outcome {
    for len in SIZES.into_iter().chain([5000]) {
        for by in [Reduction::sum(), Reduction::max(), Reduction::min()] {
            reduce::<f32, f32>(group, len, by)?;
            reduce::<f16, f16>(group, len, by)?;
            reduce::<bf16, bf16>(group, len, by)?;
        }
    }
    Ok(())
}

fn scaled(group: &ProcessGroup) -> Outcome {
    let by = Reduction::mean(group.size()).pre_scaled(0.3);
    reduce::<f32, f32>(group, 1001, by)?;
    reduce::<bf16, f32>(group, 1001, by.output(ElementType::F32))?;
    reduce::<f32, bf16>(group, 1001, by.output(ElementType::BF16))?;
    reduce::<bf16, f16>(group, 1001, by.output(ElementType::F16))
}

fn large(group: &ProcessGroup) -> Outcome {
    const LEN: usize = 700_001;
    assert_eq!(gathered(group, "x", LEN)?, counted(LEN));
    reduce::<f32, f32>(group, LEN / 8, Reduction::sum())
}

/// Runs only on two ranks with `BURN_FSDP_LONG` set, because it needs 13 GB.
fn huge(group: &ProcessGroup) -> Outcome {
    let is_pair = group.size() == 2 && group.name() == "world";
    if !is_pair || std::env::var_os("BURN_FSDP_LONG").is_none() {
        return Ok(());
    }
    // Each rank sends and receives more than 2 GiB.
    const LEN: usize = 2 * (1 << 29) + 2 * 7;
    let partition = flat(group, LEN);
    let value = |i: usize| (i % 1_000_003) as f32;
    let shard: Vec<f32> = partition.range(group.rank()).map(value).collect();
    assert!(size_of_val(&shard[..]) > i32::MAX as usize);
    let part = Part::new(source(&shard), partition, ElementType::F32);
    drop(shard);
    let into = vec![group.pool().take(4 * LEN)];
    let received = group.all_gather("x", vec![], vec![part], into)?;
    let (whole, rest) = received.buffers[0].as_ref().as_chunks::<4>();
    assert_eq!((whole.len(), rest.len()), (LEN, 0));
    for (i, bytes) in whole.iter().enumerate() {
        assert_eq!(f32::from_le_bytes(*bytes), value(i), "element {i}");
    }
    drop(received);
    group.pool().trim();
    Ok(())
}

fn any_order(group: &ProcessGroup) -> Outcome {
    let start = |label: &str, len: usize| {
        let into = vec![group.pool().take(4 * len)];
        group.start_all_gather(label, vec![], vec![counting(group, len)], into)
    };
    let part = FullPart::new(source(&floats(group.rank(), 50)), ElementType::F32);
    let first = start("first", 400)?;
    let into = vec![group.pool().take(200)];
    let middle = group.start_all_reduce("mid", vec![], Reduction::sum(), vec![part], into)?;
    let last = start("last", 60_000)?;
    // Each rank waits in a different order: a wait depends only on the starts of the other ranks.
    let (first, middle, last) = match group.rank() % 3 {
        0 => {
            let (last, middle) = (last.wait()?, middle.wait()?);
            (first.wait()?, middle, last)
        }
        1 => {
            let (middle, last) = (middle.wait()?, last.wait()?);
            (first.wait()?, middle, last)
        }
        _ => (first.wait()?, middle.wait()?, last.wait()?),
    };
    assert_eq!(values::<f32>(&first, 0), counted(400));
    assert_eq!(values::<f32>(&last, 0), counted(60_000));
    let expected = reduced::<f32, f32>(group.size(), 50, &Reduction::sum());
    assert_eq!(values::<f32>(&middle, 0), expected);
    Ok(())
}

fn discarded(group: &ProcessGroup) -> Outcome {
    let len = 30_000;
    let into = vec![group.pool().take(4 * len)];
    let gather = group.start_all_gather("x", vec![], vec![counting(group, len)], into)?;
    let into = vec![group.pool().take(4 * len)];
    let part = FullPart::new(source(&floats(group.rank(), len)), ElementType::F32);
    let reduce = group.start_all_reduce("y", vec![], Reduction::sum(), vec![part], into)?;
    if group.rank() == 0 {
        gather.discard();
        drop(reduce);
    } else {
        assert_eq!(values::<f32>(&gather.wait()?, 0), counted(len));
        let expected = reduced::<f32, f32>(group.size(), len, &Reduction::sum());
        assert_eq!(values::<f32>(&reduce.wait()?, 0), expected);
    }
    group.barrier("end")
}

fn released(group: &ProcessGroup) -> Outcome {
    for len in [100, 200_000] {
        let partition = flat(group, len);
        let shard = Arc::new(vec![7u8; 4 * partition.len(group.rank())]);
        let alive = Arc::downgrade(&shard);
        let part = Part::new(Source::from_arc(shard), partition, ElementType::F32);
        let into = vec![group.pool().take(4 * len)];
        let pending = group.start_all_gather("x", vec![], vec![part], into)?;
        let received = pending.wait_released()?;
        assert!(alive.upgrade().is_none(), "the source is still held");
        assert_eq!(values::<u8>(&received, 0), vec![7; 4 * len]);
    }
    Ok(())
}

fn groups(group: &ProcessGroup) -> Outcome {
    // More groups than most transports have channels.
    let mut some = Vec::new();
    for number in 0..40 {
        let color = group.rank() % (1 + number % 3);
        some.push(group.split(color, group.size() - group.rank(), format!("{number}"))?);
    }
    for (number, part) in some.iter().enumerate().rev() {
        let alike = |rank: &usize| rank % (1 + number % 3) == group.rank() % (1 + number % 3);
        let members: Vec<_> = (0..group.size()).rev().filter(alike).collect();
        let heard = part.exchange("who", vec![group.rank() as u8])?;
        assert_eq!(
            heard.concat(),
            members.iter().map(|rank| *rank as u8).collect::<Vec<_>>()
        );
        assert_eq!(gathered(part, "x", 9)?, counted(9));
        let world_ranks: Vec<_> = members.iter().map(|rank| group.members()[*rank]).collect();
        assert_eq!(part.members(), world_ranks);
    }
    if group.size().is_multiple_of(2) {
        let mesh = Mesh::new([("replicate", 2), ("shard", group.size() / 2)])?;
        let mesh = ProcessMesh::new(group, mesh)?;
        for axis in ["replicate", "shard"] {
            let along = mesh.along(axis)?;
            reduce::<f32, f32>(along, 77, Reduction::sum())?;
        }
    }
    Ok(())
}

fn isolated(group: &ProcessGroup) -> Outcome {
    let beside = group.isolate("beside", Duration::from_secs(60))?;
    assert_eq!(gathered(&beside, "x", 5)?, counted(5));
    if group.size() > 1 {
        let label = if group.rank() == 0 { "a" } else { "b" };
        let error = beside.barrier(label).expect_err("the ranks differ");
        let text = error.to_string();
        assert!(text.contains("called barrier \"b\""), "{text}");
        assert!(beside.barrier("x").is_err());
    }
    assert_eq!(gathered(group, "after", 5)?, counted(5));
    Ok(())
}
