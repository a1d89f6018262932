//! Bytes in files that are mapped into memory.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use memmap2::Mmap;

/// Bytes in a file without a name. Reading them needs no memory that the system could not take back at any time: it
/// reads the pages again. The file exists until this is dropped or the process ends, even if it is killed.
#[derive(Debug)]
pub struct Mapped(Mmap);

impl Mapped {
    /// Writes `bytes`, which must not be empty, to a new file in `folder`.
    ///
    /// # Errors
    ///
    /// The folder does not exist or is not writable, or its disk is full.
    pub fn new(bytes: &[u8], folder: &Path) -> io::Result<Self> {
        let mut file = tempfile::tempfile_in(folder)?;
        // Space is reserved here. Writing through the mapping would end the process on a full disk.
        file.write_all(bytes)?;
        map(&file).map(Self)
    }
}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[allow(
    unsafe_code,
    reason = "the bytes of a mapped file may change if the file does"
)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: Nothing changes or truncates the file under the mapping. It has no name, so other processes cannot open it.
    // On file systems without unnamed files, it had a random name for a moment, which no other program has a reason to
    // open. In this process, the caller has the only handle, has finished writing, and drops the handle after this. The
    // mapping keeps the file, and cannot be written to.
    unsafe { Mmap::map(file) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind;

    use burn::tensor::{DType, Device};

    use super::Mapped;
    use crate::{source, tensor};

    #[test]
    fn tensors_read_a_file_in_place_and_leave_it_unchanged() {
        let folder = tempfile::tempdir().expect("a folder");
        let values = [1.5f32, -2.0, 0.25];
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let mapped = Mapped::new(&bytes, folder.path()).expect("written");
        let named = fs::read_dir(folder.path()).expect("a folder").count();
        assert_eq!(named, 0, "the file has no name");
        let at = mapped.as_ref().as_ptr();
        let on_disk = tensor(mapped, DType::F32, &Device::flex());
        let lent = source(on_disk.clone(), None);
        assert_eq!(lent.as_bytes().as_ptr(), at);
        drop(lent);
        // The only holder of a tensor may write to its memory.
        let doubled = on_disk.clone().mul_scalar(2.0);
        assert_eq!(on_disk.to_data().as_bytes(), bytes);
        let twice = on_disk.mul_scalar(2.0).into_data();
        assert_eq!(twice, doubled.into_data());
        assert_eq!(twice.try_to_vec::<f32>().expect("f32"), [3.0, -4.0, 0.5]);
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let missing = Mapped::new(&[1], &folder.path().join("missing"));
        assert_eq!(missing.map(drop).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
