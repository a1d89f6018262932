//! The errors of meshes, layouts and partitions.

/// An invalid mesh or partition, or a question about one that has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A mesh without axes.
    #[error("a mesh needs at least one axis; for ranks in a line use Mesh::line(\"shard\", n)")]
    NoAxes,

    /// A mesh axis of no ranks.
    #[error("mesh axis \"{axis}\" has size 0; give every axis at least one rank")]
    EmptyAxis {
        /// Name of the axis.
        axis: String,
    },

    /// Two mesh axes of the same name.
    #[error("mesh axis \"{axis}\" is named twice; give every axis its own name")]
    DuplicateAxis {
        /// The name that occurs more than once.
        axis: String,
    },

    /// More ranks than a `usize` counts.
    #[error("the mesh {mesh} has more ranks than a usize can count; make its axes smaller")]
    TooManyRanks {
        /// The axes as asked for, `name=size` joined by `x`.
        mesh: String,
    },

    /// An axis that the mesh does not have.
    #[error("mesh {mesh} has no axis \"{axis}\"; use one of its own")]
    UnknownAxis {
        /// The name asked for.
        axis: String,
        /// The mesh, as it prints.
        mesh: String,
    },

    /// A rank outside the mesh.
    #[error("rank {rank} is not in mesh {mesh}; its ranks are 0 to {last}", last = num_ranks - 1)]
    RankOutOfRange {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks in the mesh.
        num_ranks: usize,
        /// The mesh, as it prints.
        mesh: String,
    },

    /// An owner that is none of the shards.
    #[error("shard {owner} cannot own a tensor in {num_shards} shards; name one of 0 to {last}", last = num_shards - 1)]
    NoSuchShard {
        /// The owner asked for.
        owner: usize,
        /// Number of shards, at least 1.
        num_shards: usize,
    },

    /// A coordinate that has not one index per axis, or an index outside its axis.
    #[error(
        "coordinate {coordinate:?} is not in mesh {mesh}; give one index per axis, each below the axis' size"
    )]
    CoordinateOutOfRange {
        /// The coordinate asked for.
        coordinate: Vec<usize>,
        /// The mesh, as it prints.
        mesh: String,
    },

    /// A partition into no shards.
    #[error("cannot cut {num_elements} elements into 0 shards; give at least one")]
    NoShards {
        /// Number of elements of the tensor.
        num_elements: usize,
    },

    /// A tensor whose padded size does not fit a `usize`.
    #[error(
        "{num_shards} shards of a tensor of shape {shape:?} hold more elements than a usize can count"
    )]
    TooManyElements {
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Number of shards.
        num_shards: usize,
    },

    /// A layout that a tensor or a mesh cannot have.
    #[error("the layout {got} is not possible; expected {expected}")]
    InvalidLayout {
        /// A layout that would be.
        expected: String,
        /// The layout asked for, as it prints.
        got: String,
    },

    /// Two partitions that are not of the same tensor.
    #[error(
        "cannot move a tensor of {from} elements into a partition of {to}; both must cut the same tensor"
    )]
    DifferentTensors {
        /// Number of elements of the partition to move from.
        from: usize,
        /// Number of elements of the partition to move to.
        to: usize,
    },
}
