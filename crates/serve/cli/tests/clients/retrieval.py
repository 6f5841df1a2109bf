"""LangChain: a program that answers questions about documents, with three models of one server.

Documents are embedded into a vector store, those that are nearest to the question are ranked by a
reranker, and a chat model answers with the best ones. Needs STOLON_URL, and STOLON_ENCODERS: the folder
with the models `embed` and `rerank`, and the vectors and scores of sentence-transformers for them.
"""

import importlib.util
import json
import os
import pathlib

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError, NotFoundError

URL = os.environ["STOLON_URL"]
# The scripted model answers as the last word says.
PROMPT = """Answer the question with these documents only.
{context}
Question: {question} script:plain"""


def expected(model):
    file = pathlib.Path(os.environ["STOLON_ENCODERS"]) / model / "expected.json"
    return json.loads(file.read_text())


def assert_close(values, others):
    assert len(values) == len(others)
    assert all(abs(a - b) < 1e-5 for a, b in zip(values, others)), (values, others)


def embeddings(**options):
    # Without the check, LangChain sends texts. With it, it sends the ids of OpenAI's tokenizer.
    options = {"check_embedding_ctx_length": False, "model": "embed", "max_retries": 0, **options}
    # Texts that are too long are cut.
    more = {"extra_body": {"truncate_prompt_tokens": -1}}
    return OpenAIEmbeddings(base_url=URL, api_key="none", model_kwargs=more, **options)


def check_embeddings():
    """The vectors of sentence-transformers, for all documents at once and for a question."""
    # An empty text is refused, as by OpenAI.
    cases = [case for case in expected("xlm_roberta")["texts"] if case["text"]]
    for vector, case in zip(embeddings().embed_documents([case["text"] for case in cases]), cases):
        assert_close(vector, case["embedding"])
    assert_close(embeddings().embed_query(cases[1]["text"]), cases[1]["embedding"])
    try:
        embeddings(model="other").embed_query("x")
        raise AssertionError("expected an error")
    except NotFoundError as error:
        assert "`embed`" in str(error), error
    # LangChain's default. LiteLLM's package has OpenAI's vocabulary, so that nothing is downloaded.
    (package,) = importlib.util.find_spec("litellm").submodule_search_locations
    os.environ["TIKTOKEN_CACHE_DIR"] = f"{package}/litellm_core_utils/tokenizers"
    try:
        embeddings(check_embedding_ctx_length=True).embed_query("x")
        raise AssertionError("expected an error")
    except BadRequestError as error:
        assert "check_embedding_ctx_length=False" in str(error), error


def main():
    check_embeddings()
    pairs = expected("xlm_roberta_reranker")["pairs"]
    question = pairs[0]["query"]
    texts = [pair["document"] for pair in pairs[1:4]] + ["The ground."]
    store = InMemoryVectorStore(embeddings())
    store.add_documents([Document(text, metadata={"number": n}) for n, text in enumerate(texts)])
    (itself,) = store.similarity_search(texts[0], k=1)
    assert itself.page_content == texts[0], itself

    reranker = CohereRerank(
        base_url=URL.removesuffix("/v1"), cohere_api_key="none", model="rerank", top_n=4
    )
    retriever = store.as_retriever(search_kwargs={"k": 4})

    def best(question):
        return reranker.compress_documents(retriever.invoke(question), question)

    ranked = best(question)
    scores = {document.page_content: document.metadata["relevance_score"] for document in ranked}
    for pair in pairs[1:4]:
        assert_close([scores[pair["document"]]], [pair["score"]])
    assert list(scores.values()) == sorted(scores.values(), reverse=True), scores
    short = reranker.rerank(texts, question, top_n=2)
    assert [entry["index"] for entry in short] == [entry.metadata["number"] for entry in ranked[:2]]

    chat = ChatOpenAI(base_url=URL, api_key="none", model="chat", temperature=0, max_retries=0)

    def context(question):
        return "\n".join(document.page_content for document in best(question))

    answer = (
        {"context": context, "question": RunnablePassthrough()}
        | ChatPromptTemplate.from_template(PROMPT)
        | chat
        | StrOutputParser()
    )
    assert answer.invoke(question) == "Hello, world."
    assert "".join(answer.stream(question)) == "Hello, world."
    assert answer.batch([question] * 4) == ["Hello, world."] * 4
    print("LangChain, retrieval with three models: all checks passed")


if __name__ == "__main__":
    main()
