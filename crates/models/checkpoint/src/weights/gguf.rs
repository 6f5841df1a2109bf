//! The tensors of GGUF files as [`Weights`], with their Hugging Face names.

use super::{Stored, Weights};
use crate::error::ModelError;
use crate::gguf::Header;
use crate::mmap::Bytes;

impl Header {
    /// Converts the tensors to weights with the names that `rename` returns. Tensors for which it
    /// returns `None` are omitted. The name of a stacked tensor has a `*` in place of an index. It
    /// is divided along its first dimension into as many tensors as `parts` returns for its name.
    /// `contents` are the bytes of [`Header::files`].
    pub(crate) fn weights(
        &self,
        contents: Vec<Bytes>,
        parts: impl Fn(&str) -> usize,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Weights, ModelError> {
        let mut weights = Weights::empty(match self.files.len() {
            1 => self.file.clone(),
            count => format!("{} and {} other parts", self.file, count - 1),
        });
        weights.add_gguf(self, contents, parts, rename)?;
        Ok(weights)
    }
}

impl Weights {
    /// Adds the tensors of GGUF files in the same way as [`Header::weights`].
    ///
    /// # Errors
    /// [`ModelError::Malformed`] if there is already a tensor with the same name, and
    /// [`ModelError::WrongShape`] if a stacked tensor cannot be divided.
    pub(crate) fn add_gguf(
        &mut self,
        header: &Header,
        contents: Vec<Bytes>,
        parts: impl Fn(&str) -> usize,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<(), ModelError> {
        let files = header.files.iter().zip(contents);
        let regions: Vec<_> = files.map(|(file, bytes)| self.add_region(file, bytes)).collect();
        self.add_gguf_tensors(header, &regions, parts, rename)
    }

    /// As [`add_gguf`](Self::add_gguf) for files that were added already. `regions` are their
    /// indices among the regions.
    pub(super) fn add_gguf_tensors(
        &mut self,
        header: &Header,
        regions: &[usize],
        parts: impl Fn(&str) -> usize,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<(), ModelError> {
        for (name, info) in &header.tensors {
            let Some(name) = rename(name) else { continue };
            let (dtype, shape) = (info.dtype.clone(), info.shape.clone());
            let stored = Stored::whole(regions[info.part], dtype, shape, info.range.clone());
            if name.contains('*') {
                let parts = stored.split(header.file_of(info), &name, parts(&name))?;
                for (index, part) in parts.enumerate() {
                    self.insert(name.replace('*', &index.to_string()), part)?;
                }
            } else {
                self.insert(name, stored)?;
            }
        }
        Ok(())
    }
}

impl Stored {
    /// Divides a tensor into the `count` parts of its first dimension. `file` and `name` are used
    /// in errors.
    fn split(
        self,
        file: &str,
        name: &str,
        count: usize,
    ) -> Result<impl Iterator<Item = Stored>, ModelError> {
        if count == 0 || self.shape.len() < 2 || self.shape[0] != count {
            let mut expected = self.shape.clone();
            expected.splice(..1.min(expected.len()), [count]);
            return Err(ModelError::WrongShape {
                file: file.into(),
                tensor: name.into(),
                expected,
                got: self.shape,
            });
        }
        let len = self.range.len() / count;
        Ok((0..count).map(move |index| {
            let start = self.range.start + index * len;
            Stored { shape: self.shape[1..].to_vec(), range: start..start + len, ..self.clone() }
        }))
    }
}
