//! Operations that move values without combining them.

mod ranks;

use burn_fsdp_collectives::{ElementType, FullPart, OperationKind, Part, Partition};
use ranks::{counting, flat, floats, full, run, source, values};

#[test]
fn all_gather_joins_shards_in_rank_order() {
    for ranks in 1..=4 {
        // Even, uneven, with empty shards, and nothing at all.
        for num_elements in [12, 7, 5, 2, 1, 0] {
            let gathered = run(ranks, move |world| ranks::gather(&world, "x", num_elements));
            let expected: Vec<_> = (0..num_elements).map(|i| i as f32).collect();
            assert_eq!(gathered, vec![expected; ranks]);
        }
    }
}

#[test]
fn all_gather_takes_lists_of_all_types_and_cuts() {
    let gathered = run(3, |world| {
        let rows = Partition::rows(&[7, 3], world.size())?;
        let bytes: Vec<u8> = rows.range(world.rank()).map(|i| i as u8).collect();
        let parts = vec![
            counting(&world, 10),
            Part::new(source(&bytes), rows, ElementType::U8),
            counting(&world, 0),
            counting(&world, 2),
        ];
        let into = [40, 21, 0, 8].map(|len| world.pool().take(len)).into();
        let buffers = world.all_gather("list", vec![], parts, into)?.buffers;
        Ok((
            values::<f32>(&buffers[0]),
            values::<u8>(&buffers[1]),
            values::<f32>(&buffers[3]),
        ))
    });
    for (floats, bytes, last) in gathered {
        assert_eq!(floats, (0..10).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(bytes, (0..21).collect::<Vec<_>>());
        assert_eq!(last, [0.0, 1.0]);
    }
}

#[test]
fn large_tensors_are_shared_among_threads() {
    use burn_fsdp_collectives::{LaunchConfig, launch};
    const NUM_ELEMENTS: usize = 1_000_003;
    let config = LaunchConfig::new(2)
        .threads_per_rank(2)
        .deadline(ranks::LONG);
    let gathered = launch(config, |world| ranks::gather(&world, "large", NUM_ELEMENTS)).unwrap();
    for full in gathered {
        assert!(full.iter().enumerate().all(|(i, x)| *x == i as f32));
    }
}

#[test]
fn notes_reach_every_rank() {
    let notes = run(3, |world| {
        let note = vec![world.rank() as u8; world.rank()];
        let into = vec![world.pool().take(20)];
        Ok(world
            .all_gather("x", note, vec![counting(&world, 5)], into)?
            .notes)
    });
    assert_eq!(notes, vec![vec![vec![], vec![1], vec![2, 2]]; 3]);
}

#[test]
fn joining_gives_without_receiving() {
    let gathered = run(3, |world| {
        if world.rank() == 1 {
            let received = world
                .join_all_gather("x", vec![9], vec![counting(&world, 7)])?
                .wait()?;
            assert!(received.buffers.is_empty());
            assert_eq!(received.notes, [vec![], vec![9], vec![]]);
            return Ok(None);
        }
        ranks::gather(&world, "x", 7).map(Some)
    });
    let expected: Vec<_> = (0..7).map(|i| i as f32).collect();
    assert_eq!(gathered, [Some(expected.clone()), None, Some(expected)]);
}

#[test]
fn broadcast_gives_the_roots_tensor() {
    for root in 0..3 {
        let received = run(3, move |world| {
            let is_root = world.rank() == root;
            let part = if is_root {
                full(&world, 11)
            } else {
                FullPart::absent(11, ElementType::F32)
            };
            let into = if is_root {
                vec![]
            } else {
                vec![world.pool().take(44)]
            };
            let received = world.broadcast("weights", vec![], root, vec![part], into)?;
            Ok(received
                .buffers
                .iter()
                .map(values::<f32>)
                .collect::<Vec<_>>())
        });
        for (rank, received) in received.into_iter().enumerate() {
            if rank == root {
                assert!(received.is_empty())
            } else {
                assert_eq!(received, [floats(root, 11)])
            }
        }
    }
}

#[test]
fn scatter_cuts_the_roots_tensor() {
    for num_elements in [9, 5, 2, 0] {
        let shards = run(4, move |world| {
            let partition = flat(&world, num_elements);
            let part = match world.rank() {
                2 => Part::new(
                    source(&floats(2, num_elements)),
                    partition,
                    ElementType::F32,
                ),
                _ => Part::absent(partition, ElementType::F32),
            };
            let into = vec![world.pool().take(partition.len(world.rank()) * 4)];
            let received = world.scatter("cut", vec![], 2, vec![part], into)?;
            Ok(values::<f32>(&received.buffers[0]))
        });
        let partition = Partition::flat(num_elements, 4).unwrap();
        let whole = floats(2, num_elements);
        let expected: Vec<_> = partition
            .ranges()
            .map(|range| whole[range].to_vec())
            .collect();
        assert_eq!(shards, expected);
    }
}

#[test]
fn gather_joins_shards_at_the_root_only() {
    let gathered = run(4, |world| {
        let into = if world.rank() == 3 {
            vec![world.pool().take(28)]
        } else {
            vec![]
        };
        let received = world.gather("join", vec![], 3, vec![counting(&world, 7)], into)?;
        Ok(received
            .buffers
            .iter()
            .map(values::<f32>)
            .collect::<Vec<_>>())
    });
    let expected: Vec<_> = (0..7).map(|i| i as f32).collect();
    assert_eq!(gathered, [vec![], vec![], vec![], vec![expected]]);
}

#[test]
fn exchange_carries_bytes_of_any_length() {
    let heard = run(3, |world| world.exchange("say", vec![7; 2 - world.rank()]));
    assert_eq!(heard, vec![vec![vec![7, 7], vec![7], vec![]]; 3]);
}

#[test]
fn pending_operations_may_be_waited_for_in_any_order() {
    let sums = run(3, |world| {
        let gather = |label: &str, n: usize| {
            let into = vec![world.pool().take(n * 4)];
            world.start_all_gather(label, vec![], vec![counting(&world, n)], into)
        };
        let reduction = burn_fsdp_collectives::Reduction::sum();
        let into = vec![world.pool().take(20)];
        let first = gather("first", 4)?;
        let reduce =
            world.start_all_reduce("mid", vec![], reduction, vec![full(&world, 5)], into)?;
        let last = gather("last", 6)?;
        // Each rank in a different order: a wait depends only on the others' starts.
        let (first, reduce, last) = match world.rank() {
            0 => {
                let (last, reduce) = (last.wait()?, reduce.wait()?);
                (first.wait()?, reduce, last)
            }
            1 => {
                let (reduce, last) = (reduce.wait()?, last.wait()?);
                (first.wait()?, reduce, last)
            }
            _ => (first.wait()?, reduce.wait()?, last.wait()?),
        };
        let sum = |received: burn_fsdp_collectives::Received| {
            values::<f32>(&received.buffers[0]).iter().sum::<f32>()
        };
        Ok([sum(first), sum(reduce), sum(last)])
    });
    assert_eq!(sums[0], sums[1]);
    assert_eq!(sums[0], sums[2]);
    assert_eq!([sums[0][0], sums[0][2]], [6.0, 15.0]);
}

#[test]
fn a_discarded_operation_still_serves_the_peers() {
    let sums = run(3, |world| {
        let reduction = burn_fsdp_collectives::Reduction::sum();
        let into = vec![world.pool().take(28)];
        let gather = world.start_all_gather("x", vec![], vec![counting(&world, 7)], into)?;
        let into = vec![world.pool().take(28)];
        let reduce = world.start_all_reduce("y", vec![], reduction, vec![full(&world, 7)], into)?;
        let sum = match world.rank() {
            1 => {
                gather.discard();
                drop(reduce);
                None
            }
            _ => Some((
                values::<f32>(&gather.wait()?.buffers[0]),
                values::<f32>(&reduce.wait()?.buffers[0]),
            )),
        };
        world.barrier("end")?;
        Ok(sum)
    });
    assert_eq!(sums[1], None);
    assert_eq!(sums[0], sums[2]);
    let (gathered, reduced) = sums[0].clone().unwrap();
    assert_eq!(gathered, (0..7).map(|i| i as f32).collect::<Vec<_>>());
    let added = |i: usize| (0..3).fold(0.0, |sum, rank| sum + floats(rank, 7)[i]);
    assert_eq!(reduced, (0..7).map(added).collect::<Vec<_>>());
}

#[test]
fn a_group_of_one_needs_no_launch() {
    let world = burn_fsdp_collectives::ProcessGroup::solo();
    assert_eq!(ranks::gather(&world, "x", 3).unwrap(), [0.0, 1.0, 2.0]);
    world.barrier("end").unwrap();
    assert_eq!(world.split(0, 0, "half").unwrap().size(), 1);
    assert_eq!(world.counts().of(OperationKind::AllGather).operations, 1);
}
