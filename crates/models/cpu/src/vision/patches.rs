//! The patches of an image. Their normalized pixels are in the order of the matrix that projects
//! them.

use stolon_backend::ImageInput;

use stolon_checkpoint::config::VisionConfig;

/// The patches of one picture of an image.
#[derive(Debug)]
pub(super) struct Patches<'a> {
    image: &'a ImageInput,
    /// The first row of the picture in the image's pixels.
    top: usize,
    /// Edge of a patch in pixels.
    edge: usize,
    /// Number of frames of a patch. The picture is repeated in all of them.
    frames: usize,
    /// Number of patches along the width and the height.
    pub(super) grid: [usize; 2],
    /// The normalized value of each byte, for each channel.
    values: [[f32; 256]; 3],
}

impl<'a> Patches<'a> {
    /// The patches of picture `index` of `image`, whose pictures of size `size` are stacked
    /// vertically. The width and height are multiples of the edge of a patch.
    pub(super) fn of(
        config: &VisionConfig,
        image: &'a ImageInput,
        size: [usize; 2],
        index: usize,
    ) -> Self {
        let edge = config.tower.patch_size;
        let mut values = [[0.0; 256]; 3];
        for (channel, values) in values.iter_mut().enumerate() {
            for (byte, value) in values.iter_mut().enumerate() {
                let share = byte as f32 / 255.0;
                *value = (share - config.mean[channel]) / config.deviation[channel];
            }
        }
        let grid = size.map(|length| length / edge);
        let frames = config.tower.frames;
        Self { image, top: index * size[1], edge, frames, grid, values }
    }

    /// Number of patches.
    pub(super) fn count(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Writes patch `index`, in row-major order, to `out`, `[3, frames, edge, edge]`.
    pub(super) fn write(&self, index: usize, out: &mut [f32]) {
        let (row, column) = (index / self.grid[0], index % self.grid[0]);
        let (edge, width) = (self.edge, self.image.size[0]);
        for (line, y) in (row * edge..(row + 1) * edge).enumerate() {
            let first = 3 * ((self.top + y) * width + column * edge);
            let pixels = self.image.pixels[first..first + 3 * edge].chunks_exact(3);
            for (x, pixel) in pixels.enumerate() {
                for (channel, byte) in pixel.iter().enumerate() {
                    out[(channel * self.frames * edge + line) * edge + x] =
                        self.values[channel][usize::from(*byte)];
                }
            }
        }
        let frame = edge * edge;
        for frames in out.chunks_exact_mut(self.frames * frame) {
            for next in 1..self.frames {
                frames.copy_within(..frame, next * frame);
            }
        }
    }
}
