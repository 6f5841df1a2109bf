//! Parts of the columns of a buffer. One product writes each part.

use std::marker::PhantomData;

use super::Target;
use crate::buffer::SharedMut;

/// Successive columns of a buffer of shape `[rows, columns]`. Nothing else can access them while
/// they exist.
#[derive(Debug)]
pub struct ColumnsMut<'a> {
    /// The first value of the first row.
    to: *mut f32,
    rows: usize,
    width: usize,
    /// Number of columns of the buffer.
    stride: usize,
    buffer: PhantomData<&'a mut [f32]>,
}

impl<'a> ColumnsMut<'a> {
    /// Divides all columns of a buffer of `rows` rows into parts with these numbers of columns.
    ///
    /// # Panics
    /// If the buffer does not have the shape `[rows, sum of widths]`.
    pub fn divide(
        buffer: &'a mut [f32],
        rows: usize,
        widths: impl IntoIterator<Item = usize>,
    ) -> Vec<Self> {
        let widths: Vec<usize> = widths.into_iter().collect();
        let stride = widths.iter().sum::<usize>();
        assert_eq!(buffer.len(), rows * stride, "the buffer must be [{rows}, {stride}]");
        let mut next = buffer.as_mut_ptr();
        let part = |width| {
            // The parts are disjoint, and together they are the buffer.
            let to = next;
            next = next.wrapping_add(width);
            Self { to, rows, width, stride, buffer: PhantomData }
        };
        widths.into_iter().map(part).collect()
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// The target that the tasks of a product write to.
    pub(super) fn target(&mut self) -> Target<'_> {
        Target::Rows { to: SharedMut::at(self.to), stride: self.stride }
    }
}
