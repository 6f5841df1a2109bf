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
        /// Element type of a stored tensor. The quantized types have the layouts of GGUF files
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
        /// quantized type.
        macro_rules! with_format {
            ($d dtype:expr, $d format:ident => $d body:expr) => {
                match $d dtype {
                    $($crate::tensor_type::TensorType::$block => {
                        type $d format = $crate::quant::$block;
                        $d body
                    })*
                    $($crate::tensor_type::TensorType::$float)|* => {
                        unreachable!("{:?} weights are not multiplied as integers", $d dtype)
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
        /// Blocks of 32 weights of 4 bits, symmetric (18 bytes).
        Q4_0("Q4_0", Some(2)),
        /// Blocks of 32 weights of 4 bits with an offset (20 bytes).
        Q4_1("Q4_1", Some(3)),
        /// Blocks of 32 weights of 5 bits, symmetric (22 bytes).
        Q5_0("Q5_0", Some(6)),
        /// Blocks of 32 weights of 5 bits with an offset (24 bytes).
        Q5_1("Q5_1", Some(7)),
        /// Blocks of 32 weights: an f16 scale and 32 signed bytes (34 bytes).
        Q8_0("Q8_0", Some(8)),
        /// Super-blocks of 256 weights of 2 bits (84 bytes).
        Q2K("Q2_K", Some(10)),
        /// Super-blocks of 256 weights of 3 bits (110 bytes).
        Q3K("Q3_K", Some(11)),
        /// Super-blocks of 256 weights of 4 bits (144 bytes).
        Q4K("Q4_K", Some(12)),
        /// Super-blocks of 256 weights of 5 bits (176 bytes).
        Q5K("Q5_K", Some(13)),
        /// Super-blocks of 256 weights of 6 bits (210 bytes).
        Q6K("Q6_K", Some(14)),
        /// Blocks of 32 weights of 4 bits, which are indices into a table (18 bytes).
        Iq4Nl("IQ4_NL", Some(20)),
        /// Super-blocks of 256 weights of 4 bits, which are indices into a table (136 bytes).
        Iq4Xs("IQ4_XS", Some(23)),
        /// Blocks of 32 floats of 4 bits (E2M1) with a power of two as scale (17 bytes).
        Mxfp4("MXFP4", Some(39)),
        /// Super-blocks of 256 weights of about 2.06 bits (66 bytes).
        Iq2Xxs("IQ2_XXS", Some(16)),
        /// Super-blocks of 256 weights of about 2.31 bits (74 bytes).
        Iq2Xs("IQ2_XS", Some(17)),
        /// Super-blocks of 256 weights of about 3.06 bits (98 bytes).
        Iq3Xxs("IQ3_XXS", Some(18)),
        /// Super-blocks of 256 weights of about 1.56 bits (50 bytes).
        Iq1S("IQ1_S", Some(19)),
        /// Super-blocks of 256 weights of about 3.44 bits (110 bytes).
        Iq3S("IQ3_S", Some(21)),
        /// Super-blocks of 256 weights of about 2.56 bits (82 bytes).
        Iq2S("IQ2_S", Some(22)),
        /// Super-blocks of 256 weights of 1.75 bits (56 bytes).
        Iq1M("IQ1_M", Some(29)),
        /// Super-blocks of 256 weights -1, 0 or 1 of about 1.69 bits (54 bytes).
        Tq1_0("TQ1_0", Some(34)),
        /// Super-blocks of 256 weights of about 2.06 bits from -1 to 2 (66 bytes).
        Tq2_0("TQ2_0", Some(35)),
        /// Blocks of 32 signed bytes with an f32 scale for every 16 of them (40 bytes): the two
        /// scales, then the bytes. No file has this type; weights of other types are converted to
        /// it.
        I8Group16("I8 with a scale per 16", None),
        /// Blocks of 32 signed bytes with an f32 scale (36 bytes): the scale, then the bytes. No
        /// file has this type; weights of other types are converted to it.
        I8Group32("I8 with a scale per 32", None),
        /// Blocks of 32 weights of 4 bits (24 bytes): an f32 scale, an f32 minimum, and 16 bytes
        /// whose low bits are the first 16 weights and whose high bits are the last 16. The value
        /// of a weight is `scale * bits - minimum`, where `bits` is from 0 to 15. No file has this
        /// type; weights of other types are converted to it.
        U4Group32("U4 with a scale per 32", None),
        /// Blocks of 128 weights of 4 bits (72 bytes): as [`U4Group32`](Self::U4Group32), with the
        /// 16 bytes of four times 32 weights after the scale and the minimum.
        U4Group128("U4 with a scale per 128", None),
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
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }
}
