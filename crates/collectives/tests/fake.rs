//! One rank of many, without the others, on one thread.

mod ranks;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_fsdp_collectives::{
    Buffer, CommCounter, ElementType, Error, FullPart, Mesh, OperationKind, Part, ProcessGroup,
    ProcessMesh, Reduction,
};
use ranks::{flat, floats, source, values};

fn buffer(group: &ProcessGroup, num_elements: usize) -> Vec<Buffer> {
    vec![group.pool().take(4 * num_elements)]
}

#[test]
fn gathers_fill_every_place_with_the_ranks_own_shard() -> Result<(), Error> {
    for rank in 0..3 {
        let group = ProcessGroup::fake(3, rank);
        let partition = flat(&group, 7);
        let shard: Vec<f32> = (0..partition.len(rank)).map(|i| 1.0 + i as f32).collect();
        let own = Part::new(source(&shard), partition, ElementType::F32);
        let got = group.all_gather("all", Vec::new(), vec![own], buffer(&group, 7))?;
        let full: Vec<f32> = values(&got.buffers[0]);
        for other in 0..3 {
            for (i, got) in full[partition.range(other)].iter().enumerate() {
                assert_eq!(*got, shard.get(i).copied().unwrap_or(0.0), "{full:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn reductions_act_as_if_all_ranks_had_given_the_same() -> Result<(), Error> {
    let group = ProcessGroup::fake(4, 2);
    let own = floats(2, 6);
    let part = || FullPart::new(source(&own), ElementType::F32);
    let sum = group.all_reduce(
        "sum",
        vec![9],
        Reduction::sum(),
        vec![part()],
        buffer(&group, 6),
    )?;
    let fourfold: Vec<f32> = own.iter().map(|x| x + x + x + x).collect();
    assert_eq!(values::<f32>(&sum.buffers[0]), fourfold);
    assert_eq!(sum.notes, vec![vec![9]; 4]);
    let partition = flat(&group, 6);
    let range = partition.range(2);
    let full = Part::new(source(&own), partition, ElementType::F32);
    let into = buffer(&group, range.len());
    let mean = group.reduce_scatter("mean", vec![], Reduction::mean(4), vec![full], into)?;
    assert_eq!(values::<f32>(&mean.buffers[0]), own[range]);
    Ok(())
}

#[test]
fn values_of_other_ranks_are_zero() -> Result<(), Error> {
    let group = ProcessGroup::fake(2, 1);
    let absent = FullPart::absent(3, ElementType::F32);
    let got = group.broadcast("values", vec![], 0, vec![absent], buffer(&group, 3))?;
    assert_eq!(values::<f32>(&got.buffers[0]), [0.0; 3]);
    let absent = Part::absent(flat(&group, 3), ElementType::F32);
    let len = flat(&group, 3).len(1);
    let got = group.scatter("values", vec![], 0, vec![absent], buffer(&group, len))?;
    assert_eq!(values::<f32>(&got.buffers[0]), vec![0.0; len]);
    let root = ProcessGroup::fake(2, 0);
    let all = [1f32, 2.0, 3.0];
    let partition = flat(&root, 3);
    let own = partition.range(0);
    let full = Part::new(source(&all), partition, ElementType::F32);
    let got = root.scatter("values", vec![], 0, vec![full], buffer(&root, own.len()))?;
    assert_eq!(values::<f32>(&got.buffers[0]), all[own]);
    Ok(())
}

#[test]
fn arguments_are_checked_as_among_real_peers() {
    let group = ProcessGroup::fake(2, 0);
    let short = Part::new(source(&[1f32]), flat(&group, 5), ElementType::F32);
    let error = group
        .all_gather("short", Vec::new(), vec![short], buffer(&group, 5))
        .unwrap_err();
    assert!(error.to_string().contains("parts[0].source"), "{error}");
}

#[test]
fn a_mesh_of_fakes_has_groups_of_the_right_sizes() -> Result<(), Error> {
    let world = ProcessGroup::fake(8, 6);
    assert!(world.is_fake() && !ProcessGroup::solo().is_fake());
    let layout = Mesh::new([("replicate", 2), ("shard", 4)])?;
    let mesh = ProcessMesh::new(&world, layout)?;
    let along = |axis| mesh.along(axis).map(|group| (group.rank(), group.size()));
    assert_eq!((along("shard")?, along("replicate")?), ((2, 4), (1, 2)));
    assert_eq!(world.counts().of(OperationKind::Exchange).operations, 2);
    Ok(())
}

#[test]
fn counters_span_groups_and_report_what_they_saw() -> Result<(), Error> {
    let (one, other) = (ProcessGroup::fake(2, 0), ProcessGroup::fake(3, 0));
    one.barrier("before")?;
    let mut counter = CommCounter::new([&one, &other]);
    one.barrier("a")?;
    other.exchange("b", vec![1, 2])?;
    counter.expect(&[(OperationKind::Barrier, 1), (OperationKind::Exchange, 1)]);
    assert_eq!(
        counter.to_string(),
        "fake: 1 barrier; fake: 1 exchange (2 bytes)"
    );
    let expect = AssertUnwindSafe(|| counter.expect(&[(OperationKind::Barrier, 2)]));
    let seen = catch_unwind(expect);
    let message = *seen.unwrap_err().downcast::<String>().expect("formatted");
    assert!(message.contains("expected 2 barrier, got 1"), "{message}");
    assert!(message.contains("1 exchange (2 bytes)"), "{message}");
    counter.reset();
    counter.expect(&[]);
    Ok(())
}
