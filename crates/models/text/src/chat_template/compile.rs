//! Compiles a template so that it is metered: before an operator can allocate memory or take time
//! in proportion to its operands, a guard takes their size from the rendering's budget. The guards
//! are inserted into the instructions that minijinja's compiler has produced. Filters, tests and
//! methods are metered in their own functions.
//!
//! minijinja's own limit, `fuel`, cannot replace the guards. It counts instructions, and
//! `{% set a = a ~ a %}` doubles a text with four of them, without calling a function, filter,
//! formatter or object in which memory could be counted.

use std::collections::BTreeMap;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token};
use minijinja::machinery::{Tokenizer, WhitespaceConfig, parse};
use minijinja::{Error, ErrorKind, Value};

use super::guards::{self, EAGER};
use super::limits::{MAX_CONSTANTS, MAX_TAG_TOKENS};
use super::lists::{self, LIST};

/// The whitespace rules of transformers.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// A compiled template.
pub(super) struct Compiled<'source> {
    pub(super) main: Instructions<'source>,
    pub(super) blocks: BTreeMap<&'source str, Instructions<'source>>,
}

/// Compiles the template. Needs a large stack, because minijinja's compiler is recursive.
pub(super) fn compile<'source>(
    name: &'source str,
    source: &'source str,
) -> Result<Compiled<'source>, Error> {
    check_tags(name, source)?;
    let syntax = parse(source, name, Default::default(), WHITESPACE)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&syntax);
    let (main, blocks) = generator.finish();
    let blocks = blocks.into_iter().map(|(name, block)| (name, metered(&block))).collect();
    Ok(Compiled { main: metered(&main), blocks })
}

/// Refuses tags with too many tokens, and constants that become too large when they are multiplied:
/// the compiler computes `'a' * 1000` itself. Also refuses calls such as `f(*list)`, which copy the
/// list to the stack.
fn check_tags(name: &str, source: &str) -> Result<(), Error> {
    let mut tokenizer = Tokenizer::new(source, name, false, Default::default(), WHITESPACE);
    let mut tag = Tag::default();
    let mut constants = 0_usize;
    let mut may_begin_argument = false;
    while let Some((token, span)) = tokenizer.next_token()? {
        let unpacks = may_begin_argument && matches!(token, Token::Mul | Token::Pow);
        may_begin_argument = matches!(token, Token::ParenOpen | Token::Comma);
        match token {
            Token::VariableStart | Token::BlockStart => tag = Tag::default(),
            Token::VariableEnd | Token::BlockEnd => {
                constants = constants.saturating_add(tag.constants());
            }
            token => tag.add(&token),
        }
        let expected = if tag.tokens > MAX_TAG_TOKENS {
            format!("at most {MAX_TAG_TOKENS} tokens in one tag")
        } else if constants > MAX_CONSTANTS {
            format!("products of constants of at most {MAX_CONSTANTS} bytes")
        } else if unpacks {
            "arguments without `*` or `**`".to_owned()
        } else {
            continue;
        };
        let reason = format!("line {}: expected {expected}", span.start_line);
        return Err(Error::new(ErrorKind::SyntaxError, reason));
    }
    Ok(())
}

/// The size of a tag's content.
struct Tag {
    tokens: usize,
    /// Length of all texts in bytes.
    text: usize,
    /// The product of all numbers. At least 2 is assumed for each, so it is at least their sum too.
    product: usize,
    largest: usize,
    multiplies: bool,
    raises: bool,
}

impl Default for Tag {
    fn default() -> Self {
        Self { tokens: 0, text: 0, product: 1, largest: 1, multiplies: false, raises: false }
    }
}

impl Tag {
    fn add(&mut self, token: &Token<'_>) {
        self.tokens += 1;
        let number = match token {
            Token::Str(text) => return self.text += text.len(),
            Token::String(text) => return self.text += text.len(),
            Token::Mul => return self.multiplies = true,
            Token::Pow => return self.raises = true,
            Token::Int(number) => usize::try_from(*number).unwrap_or(usize::MAX),
            Token::Int128(_) => usize::MAX,
            Token::Float(number) => *number as usize,
            Token::Ident("true" | "True") => 1,
            _ => return,
        };
        self.largest = self.largest.max(number);
        self.product = self.product.saturating_mul(number.max(2));
    }

    /// The maximum size in bytes of a product of the tag's constants.
    fn constants(&self) -> usize {
        if self.raises {
            let exponent = u32::try_from(self.largest).unwrap_or(u32::MAX);
            let power = self.largest.max(2).saturating_pow(exponent);
            return (self.text + self.tokens).saturating_mul(power.max(self.product));
        }
        if self.multiplies { (self.text + self.tokens).saturating_mul(self.product) } else { 0 }
    }
}

/// Copies the instructions and inserts guards. Jump targets are moved accordingly.
fn metered<'source>(old: &Instructions<'source>) -> Instructions<'source> {
    let all: Vec<Instruction<'source>> = (0..).map_while(|index| old.get(index).cloned()).collect();
    let mut places = Vec::with_capacity(all.len() + 1);
    let mut place = 0;
    for instruction in &all {
        places.push(place);
        place += 1 + extra(instruction);
    }
    places.push(place);
    let moved = |target: u32| places.get(target as usize).copied().unwrap_or(target);
    let mut new = Instructions::new(old.name(), old.source());
    for (index, instruction) in (0..).zip(&all) {
        let mut add = |instruction| match (old.get_span(index), old.get_line(index)) {
            (Some(span), _) => new.add_with_span(instruction, span),
            (None, Some(line)) => {
                new.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX))
            }
            (None, None) => new.add(instruction),
        };
        if let Some((guard, operands)) = guards::before(instruction) {
            add(Instruction::CallFunction(guard, Some(operands)));
            add(Instruction::UnpackList(operands.into()));
        }
        match instruction {
            // Text is written by the formatter, which takes it from the budget.
            Instruction::EmitRaw(text) => {
                add(Instruction::LoadConst(Value::from(*text)));
                add(Instruction::Emit);
            }
            Instruction::Slice => {
                add(Instruction::Slice);
                add(Instruction::CallFunction(EAGER, Some(1)));
            }
            Instruction::Iterate(target) => drop(add(Instruction::Iterate(moved(*target)))),
            Instruction::Jump(target) => drop(add(Instruction::Jump(moved(*target)))),
            Instruction::JumpIfFalse(target) => {
                add(Instruction::JumpIfFalse(moved(*target)));
            }
            Instruction::JumpIfFalseOrPop(target) => {
                add(Instruction::JumpIfFalseOrPop(moved(*target)));
            }
            Instruction::JumpIfTrueOrPop(target) => {
                add(Instruction::JumpIfTrueOrPop(moved(*target)));
            }
            Instruction::BuildMacro(name, target, flags) => {
                add(Instruction::BuildMacro(name, moved(*target), *flags));
            }
            literal if lists::is_literal(literal) => {
                add(literal.clone());
                add(Instruction::CallFunction(LIST, Some(1)));
            }
            other => drop(add(other.clone())),
        }
    }
    new
}

/// The number of instructions that are added to an instruction.
fn extra(instruction: &Instruction<'_>) -> u32 {
    let own = matches!(instruction, Instruction::EmitRaw(_) | Instruction::Slice)
        || lists::is_literal(instruction);
    let guard = if guards::before(instruction).is_some() { 2 } else { 0 };
    u32::from(own) + guard
}
