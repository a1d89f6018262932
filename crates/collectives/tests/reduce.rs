//! Reductions produce exactly the bits of adding in rank order.

mod ranks;

use burn_fsdp_collectives::{
    ElementType, Error, FullPart, LaunchConfig, Part, Partition, ProcessGroup, ReduceOp, Reduction,
    launch,
};
use bytemuck::Pod;
use half::{bf16, f16};
use proptest::prelude::*;
use ranks::{flat, floats, run, source, values};

/// Returns the expected bits of the reduction of these `f32` tensors, one per rank.
fn oracle(reduction: Reduction, tensors: &[Vec<f32>]) -> Vec<f32> {
    let (pre, share) = (reduction.pre_scale as f32, 1.0 / tensors.len() as f64);
    let share = if reduction.op == ReduceOp::Mean {
        share
    } else {
        1.0
    };
    let post = (reduction.post_scale * share) as f32;
    let combine = |a: f32, b: f32| match reduction.op {
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
        _ => a + b,
    };
    let element = |i: usize| tensors.iter().map(|tensor| tensor[i] * pre).reduce(combine);
    (0..tensors[0].len())
        .map(|i| element(i).unwrap() * post)
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Reduces the ranks' tensors both ways. Returns the joined shards, and every rank's all-reduce result.
fn reduce_both_ways<I: Pod + Send + Sync, O: Pod + Send>(
    config: LaunchConfig,
    reduction: Reduction,
    element: ElementType,
    tensors: Vec<Vec<I>>,
) -> (Vec<O>, Vec<Vec<O>>) {
    let output = reduction.output_of(element).size();
    let reduced = launch(config, move |world: ProcessGroup| {
        let tensor = &tensors[world.rank()];
        let partition = flat(&world, tensor.len());
        let into = vec![world.pool().take(partition.len(world.rank()) * output)];
        let part = vec![Part::new(source(tensor), partition, element)];
        let shard = world.reduce_scatter("scatter", vec![], reduction, part, into)?;
        let into = vec![world.pool().take(tensor.len() * output)];
        let part = vec![FullPart::new(source(tensor), element)];
        let full = world.all_reduce("all", vec![], reduction, part, into)?;
        Ok::<_, Error>((
            values::<O>(&shard.buffers[0]),
            values::<O>(&full.buffers[0]),
        ))
    });
    let (shards, fulls): (Vec<_>, Vec<_>) = reduced.unwrap().into_iter().unzip();
    (shards.concat(), fulls)
}

/// Does the same without a conversion of the type.
fn reduce_in_kind<T: Pod + Send + Sync>(
    config: LaunchConfig,
    reduction: Reduction,
    element: ElementType,
    tensors: Vec<Vec<T>>,
) -> (Vec<T>, Vec<Vec<T>>) {
    reduce_both_ways(config, reduction, element, tensors)
}

#[test]
fn sums_follow_rank_order() {
    for ranks in 1..=4 {
        // Longer than a block, and with uneven and empty shards.
        for num_elements in [5000, 4096, 7, 2, 1, 0] {
            let tensors: Vec<_> = (0..ranks).map(|rank| floats(rank, num_elements)).collect();
            for reduction in [Reduction::sum(), Reduction::mean(ranks), Reduction::max()] {
                let expected = bits(&oracle(reduction, &tensors));
                let config = LaunchConfig::new(ranks);
                let (joined, fulls) =
                    reduce_in_kind(config, reduction, ElementType::F32, tensors.clone());
                assert_eq!(bits(&joined), expected, "{ranks} ranks, {reduction}");
                assert!(fulls.iter().all(|full| bits(full) == expected));
            }
        }
    }
}

#[test]
fn the_thread_count_does_not_change_bits() {
    let num_elements = 1_100_001;
    let tensors: Vec<_> = (0..3).map(|rank| floats(rank, num_elements)).collect();
    let expected = bits(&oracle(Reduction::mean(3), &tensors));
    for threads in [1, 3] {
        let config = LaunchConfig::new(3).threads_per_rank(threads);
        let (joined, fulls) = reduce_in_kind(
            config,
            Reduction::mean(3),
            ElementType::F32,
            tensors.clone(),
        );
        assert!(bits(&joined) == expected);
        assert!(fulls.iter().all(|full| bits(full) == expected));
    }
}

#[test]
fn half_floats_are_added_in_f32_and_rounded_once() {
    // In bf16, 256 + 1 = 256, three times over; in f32 the sum is 259, rounded to 260.
    let tensors = [256.0, 1.0, 1.0, 1.0]
        .map(|x| vec![bf16::from_f32(x); 3])
        .to_vec();
    let config = LaunchConfig::new(4);
    let (joined, fulls) =
        reduce_in_kind(config, Reduction::sum(), ElementType::BF16, tensors.clone());
    assert_eq!(joined, [bf16::from_f32(259.0); 3]);
    assert_eq!(joined[0].to_f32(), 260.0);
    assert_eq!(fulls, vec![joined; 4]);

    let reduction = Reduction::sum().output(ElementType::F32);
    let (joined, _) = reduce_both_ways::<_, f32>(config, reduction, ElementType::BF16, tensors);
    assert_eq!(joined, [259.0; 3]);

    let tensors = [2048.0, 1.0, 1.0, 1.0]
        .map(|x| vec![f16::from_f32(x); 5])
        .to_vec();
    let (joined, _) = reduce_in_kind(config, Reduction::sum(), ElementType::F16, tensors);
    assert_eq!(joined, [f16::from_f32(2051.0); 5]);

    let tensors = [1.0f32, 1.0 / 256.0].map(|x| vec![x; 4]).to_vec();
    let reduction = Reduction::sum().output(ElementType::BF16);
    let (joined, _) =
        reduce_both_ways::<_, bf16>(LaunchConfig::new(2), reduction, ElementType::F32, tensors);
    assert_eq!(joined, [bf16::from_f32(1.0 + 1.0 / 256.0); 4]);
}

#[test]
fn doubles_are_scaled_as_doubles() {
    let tensors = vec![vec![1.0f64], vec![1.0], vec![1e-9]];
    let (joined, _) = reduce_in_kind(
        LaunchConfig::new(3),
        Reduction::mean(3),
        ElementType::F64,
        tensors,
    );
    assert_eq!(joined, [(1.0f64 + 1.0 + 1e-9) * (1.0 / 3.0)]);
}

#[test]
fn integers_wrap() {
    let tensors = vec![vec![250u8, 1], vec![10, 2]];
    let config = LaunchConfig::new(2);
    let (joined, _) = reduce_in_kind(config, Reduction::sum(), ElementType::U8, tensors.clone());
    assert_eq!(joined, [4u8, 3]);
    let (joined, _) = reduce_in_kind(config, Reduction::max(), ElementType::U8, tensors);
    assert_eq!(joined, [250u8, 2]);
    let tensors = vec![vec![i64::MIN], vec![-1]];
    let (joined, _) = reduce_in_kind(config, Reduction::sum(), ElementType::I64, tensors);
    assert_eq!(joined, [i64::MAX]);
}

#[test]
fn mean_divides_by_the_group() {
    let reduction = Reduction {
        op: ReduceOp::Mean,
        ..Reduction::sum()
    };
    let tensors = vec![vec![1.0f32], vec![2.0], vec![6.0]];
    let (joined, _) = reduce_in_kind(LaunchConfig::new(3), reduction, ElementType::F32, tensors);
    assert_eq!(joined, [9.0 * (1.0f32 / 3.0)]);
}

#[test]
fn a_nan_of_any_rank_propagates() {
    for rank in 0..3 {
        let mut tensors = vec![vec![1.0f32]; 3];
        tensors[rank][0] = f32::NAN;
        for reduction in [Reduction::sum(), Reduction::max(), Reduction::min()] {
            let config = LaunchConfig::new(3);
            let (joined, _): (Vec<f32>, _) =
                reduce_in_kind(config, reduction, ElementType::F32, tensors.clone());
            assert!(joined[0].is_nan(), "{reduction}, NaN of rank {rank}");
        }
    }
}

#[test]
fn sources_need_no_alignment() {
    struct Askew(Vec<u8>);
    impl AsRef<[u8]> for Askew {
        fn as_ref(&self) -> &[u8] {
            // One of two neighbours is not aligned for f32, regardless of the allocation.
            &self.0[1..]
        }
    }
    let sums = run(2, |world| {
        let bytes: Vec<u8> = [1.5f32, 2.5].iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mut padded = vec![0];
        padded.extend(bytes);
        let part = FullPart::new(
            burn_fsdp_collectives::Source::new(Askew(padded)),
            ElementType::F32,
        );
        let into = vec![world.pool().take(8)];
        let received = world.all_reduce("x", vec![], Reduction::sum(), vec![part], into)?;
        Ok(values::<f32>(&received.buffers[0]))
    });
    assert_eq!(sums, [[3.0, 5.0]; 2]);
}

#[test]
fn parts_of_different_types_can_be_reduced_together() {
    let sums = run(3, |world| {
        let rows = Partition::rows(&[4, 2], world.size())?;
        let halves: Vec<_> = (0..8).map(|i| bf16::from_f32(i as f32)).collect();
        let parts = vec![
            Part::new(
                source(&floats(world.rank(), 7)),
                flat(&world, 7),
                ElementType::F32,
            ),
            Part::new(source(&halves), rows, ElementType::BF16),
        ];
        let lens = [
            flat(&world, 7).len(world.rank()) * 4,
            rows.len(world.rank()) * 4,
        ];
        let into = lens.map(|len| world.pool().take(len)).into();
        let reduction = Reduction::sum().output(ElementType::F32);
        let buffers = world
            .reduce_scatter("list", vec![], reduction, parts, into)?
            .buffers;
        Ok((values::<f32>(&buffers[0]), values::<f32>(&buffers[1])))
    });
    let (first, second): (Vec<_>, Vec<_>) = sums.into_iter().unzip();
    let tensors: Vec<_> = (0..3).map(|rank| floats(rank, 7)).collect();
    assert_eq!(
        bits(&first.concat()),
        bits(&oracle(Reduction::sum(), &tensors))
    );
    assert_eq!(
        second,
        [
            vec![0.0, 3.0, 6.0, 9.0],
            vec![12.0, 15.0, 18.0, 21.0],
            vec![]
        ]
    );
}

#[test]
fn released_sources_are_free() {
    let freed = run(3, |world| {
        let tensor = world.pool().take(4096);
        let partition = flat(&world, 1024);
        let into = vec![world.pool().take(partition.len(world.rank()) * 4)];
        let source = burn_fsdp_collectives::Source::new(tensor);
        let part = vec![Part::new(source, partition, ElementType::F32)];
        let pending = world.start_reduce_scatter("grads", vec![], Reduction::sum(), part, into)?;
        let before = world.pool().live_bytes();
        let received = pending.wait_released()?;
        let after = world.pool().live_bytes();
        drop(received);
        Ok(before - after)
    });
    assert_eq!(freed, [4096; 3]);
}

#[test]
fn refuses_unsupported_reductions() {
    let world = ProcessGroup::solo();
    let call = |reduction, element: ElementType| {
        let part = vec![FullPart::absent(0, element)];
        let into = vec![world.pool().take(0)];
        world
            .all_reduce("x", vec![], reduction, part, into)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(
        call(Reduction::mean(2), ElementType::I32).unwrap_err(),
        "rank 0: in all_reduce \"x\" (operation 0 of group \"world\"), parts[0] should be a type \
         that the reduction supports but is i32 with a scale; correct this rank's call"
    );
    assert!(call(Reduction::sum().output(ElementType::F32), ElementType::F64).is_err());
    assert!(call(Reduction::sum().output(ElementType::I64), ElementType::I32).is_err());
    assert!(call(Reduction::sum().pre_scaled(f64::NAN), ElementType::F32).is_err());
    assert!(call(Reduction::sum().output(ElementType::I32), ElementType::I32).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_reduction_matches_the_oracle(
        ranks in 1usize..5,
        num_elements in 0usize..40,
        seed in prop::collection::vec(-1e6f32..1e6, 160),
        op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min]),
        pre in prop::sample::select(vec![1.0, 0.5, 1.0 / 3.0, 3.0]),
        post in prop::sample::select(vec![1.0, 0.25, 1.0 / 7.0]),
    ) {
        let reduction = Reduction { op, pre_scale: pre, post_scale: post, output: None };
        let tensors: Vec<Vec<f32>> =
            (0..ranks).map(|rank| seed[rank * 40..rank * 40 + num_elements].to_vec()).collect();
        let expected = oracle(reduction, &tensors);
        let config = LaunchConfig::new(ranks);
        let (joined, fulls) =
            reduce_in_kind(config, reduction, ElementType::F32, tensors.clone());
        prop_assert_eq!(bits(&joined), bits(&expected));
        for full in fulls {
            prop_assert_eq!(bits(&full), bits(&expected));
        }
        // The same from halves: widened exactly, rounded once.
        let halves: Vec<Vec<bf16>> = tensors
            .iter()
            .map(|tensor| tensor.iter().map(|x| bf16::from_f32(*x)).collect())
            .collect();
        let widened: Vec<Vec<f32>> =
            halves.iter().map(|tensor| tensor.iter().map(|x| x.to_f32()).collect()).collect();
        let expected: Vec<_> =
            oracle(reduction, &widened).iter().map(|x| bf16::from_f32(*x)).collect();
        let (joined, _) = reduce_in_kind(config, reduction, ElementType::BF16, halves);
        prop_assert_eq!(joined, expected);
    }
}
