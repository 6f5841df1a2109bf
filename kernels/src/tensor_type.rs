//! The element types of weights, as checkpoint files store them and kernels multiply them.

/// Makes [`TensorType`] and the macro `with_format!` from the list of all types. The first argument
/// is a dollar sign, which the definition of the inner macro needs.
///
/// * `floats`: types of single values, with their name, their number in GGUF files and their bytes.
/// * `blocks`: types of blocks, with their name and their number in GGUF files. Everything else
///   about such a type is in its implementation of [`Format`](crate::quant::Format), which has the
///   name of the variant.
macro_rules! tensor_types {
    (
        $d:tt
        floats { $($(#[$float_doc:meta])* $float:ident($float_name:literal, $float_id:literal, $bytes:literal),)* }
        blocks { $($(#[$block_doc:meta])* $block:ident($block_name:literal, $block_id:expr),)* }
    ) => {
        /// Element type of a stored tensor. The quantised types have the layouts of GGUF files
        /// (ggml).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum TensorType {
            $($(#[$float_doc])* $float,)*
            $($(#[$block_doc])* $block,)*
        }

        impl TensorType {
            /// All element types.
            pub const ALL: [Self; { [$($float_name,)* $($block_name),*].len() }] =
                [$(Self::$float,)* $(Self::$block),*];

            /// Number of elements in a block, the unit of storage: 1, or a multiple of 32. The row
            /// length of a tensor must be a multiple of it.
            #[must_use]
            pub fn block_len(self) -> usize {
                match self {
                    $(Self::$float => 1,)*
                    $(Self::$block => <crate::quant::$block as crate::quant::Format>::BLOCK_LEN,)*
                }
            }

            /// Bytes of one block, that is, of [`block_len`](Self::block_len) elements.
            #[must_use]
            pub fn block_bytes(self) -> usize {
                match self {
                    $(Self::$float => $bytes,)*
                    $(Self::$block => <crate::quant::$block as crate::quant::Format>::BLOCK_BYTES,)*
                }
            }

            /// The name used in messages and files, such as `BF16` or `Q4_K`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$float => $float_name,)*
                    $(Self::$block => $block_name,)*
                }
            }

            /// The number of the type in GGUF files.
            #[must_use]
            pub fn gguf_id(self) -> Option<u32> {
                match self {
                    $(Self::$float => Some($float_id),)*
                    $(Self::$block => $block_id,)*
                }
            }
        }

        /// Evaluates an expression in which a name is the [`Format`](crate::quant::Format) of a
        /// quantised type.
        macro_rules! with_format {
            ($d dtype:expr, $d format:ident => $d body:expr) => {
                match $d dtype {
                    $($crate::tensor_type::TensorType::$block => {
                        type $d format = $crate::quant::$block;
                        $d body
                    })*
                    $($crate::tensor_type::TensorType::$float)|* => {
                        unreachable!("{:?} weights are not quantised", $d dtype)
                    }
                }
            };
        }
        pub(crate) use with_format;
    };
}

tensor_types! {
    $
    floats {
        /// IEEE 754 single precision, 4 bytes.
        F32("F32", 0, 4),
        /// IEEE 754 half precision, 2 bytes.
        F16("F16", 1, 2),
        /// The upper 16 bits of an f32 (bfloat16), 2 bytes.
        Bf16("BF16", 30, 2),
    }
    blocks {
        /// Blocks of 32 weights: an f16 scale and 32 signed bytes (34 bytes).
        Q8_0("Q8_0", Some(8)),
        /// Super-blocks of 256 weights of 4 bits (144 bytes).
        Q4K("Q4_K", Some(12)),
        /// Super-blocks of 256 weights of 5 bits (176 bytes).
        Q5K("Q5_K", Some(13)),
        /// Super-blocks of 256 weights of 6 bits (210 bytes).
        Q6K("Q6_K", Some(14)),
    }
}

impl TensorType {
    /// The type with the number `id` in GGUF files, if it is supported.
    #[must_use]
    pub fn from_gguf_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.gguf_id() == Some(id))
    }

    /// Bytes of a tensor with `elements` elements; `None` if `elements` is not a multiple of
    /// [`block_len`](Self::block_len) or the size overflows.
    #[must_use]
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether the weights are stored in blocks with common scales.
    #[must_use]
    pub fn is_quantised(self) -> bool {
        self.block_len() > 1
    }
}
