//! Writes small GGUF files for tests, valid and malformed.

/// A metadata value.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Floats(Vec<f32>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
}

/// A tensor: GGUF name, shape (outermost dimension first), type number, bytes.
pub(crate) type Entry = (String, Vec<usize>, u32, Vec<u8>);

/// The contents of a GGUF file.
#[derive(Clone, Debug, Default)]
pub(crate) struct GgufWriter {
    pub(crate) metadata: Vec<(String, Meta)>,
    pub(crate) tensors: Vec<Entry>,
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array(out: &mut Vec<u8>, type_id: u32, count: usize) {
    out.extend(9_u32.to_le_bytes());
    out.extend(type_id.to_le_bytes());
    out.extend((count as u64).to_le_bytes());
}

fn value(out: &mut Vec<u8>, value: &Meta) {
    let id = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
    match value {
        Meta::U16(n) => (id(out, 2), out.extend(n.to_le_bytes())).1,
        Meta::U32(n) => (id(out, 4), out.extend(n.to_le_bytes())).1,
        Meta::I32(n) => (id(out, 5), out.extend(n.to_le_bytes())).1,
        Meta::F32(n) => (id(out, 6), out.extend(n.to_le_bytes())).1,
        Meta::Bool(flag) => (id(out, 7), out.push(u8::from(*flag))).1,
        Meta::Text(string) => (id(out, 8), text(out, string)).1,
        Meta::Texts(list) => {
            array(out, 8, list.len());
            list.iter().for_each(|string| text(out, string));
        }
        Meta::Floats(list) => {
            array(out, 6, list.len());
            list.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::I32s(list) => {
            array(out, 5, list.len());
            list.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
        Meta::Bools(list) => {
            array(out, 7, list.len());
            out.extend(list.iter().map(|flag| u8::from(*flag)));
        }
    }
}

impl GgufWriter {
    pub(crate) fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(there, _)| there != key);
        self.metadata.push((key.to_owned(), value));
    }

    /// The file split into `count` parts with about as many tensors each, as llama.cpp does it: the
    /// first part has the metadata.
    pub(crate) fn split(&self, count: usize) -> Vec<Self> {
        let per_part = self.tensors.len().div_ceil(count);
        let mut parts = vec![Self::default(); count];
        parts[0].metadata.clone_from(&self.metadata);
        for (index, part) in parts.iter_mut().enumerate() {
            part.set("split.no", Meta::U16(index as u16));
            part.set("split.count", Meta::U16(count as u16));
            part.set("split.tensors.count", Meta::I32(self.tensors.len() as i32));
            part.tensors =
                self.tensors.iter().skip(index * per_part).take(per_part).cloned().collect();
        }
        parts
    }

    /// The bytes of the file in version 3, with the data aligned to 32 bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, entry) in &self.metadata {
            text(&mut out, key);
            value(&mut out, entry);
        }
        let mut offset = 0;
        for (name, shape, type_id, bytes) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
            out.extend(type_id.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(32);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(bytes);
        }
        out
    }
}
