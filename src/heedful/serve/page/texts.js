// The texts of the page in each language, and the functions that show them.

const TEXTS = {
  en: {
    title: "heedful",
    skip: "Skip to the content",
    uses: "What to do",
    switchLanguage: "中文",
    themeAuto: "Theme: auto",
    themeLight: "Theme: light",
    themeDark: "Theme: dark",
    keyLabel: "This server needs an API key",
    keySave: "Use this key",
    tabTranslate: "Translate",
    tabGenerate: "Generate",
    tabChat: "Chat",
    tabClassify: "Classify",
    tabFill: "Fill",
    from: "From",
    to: "To",
    detect: "Detect language",
    anyLanguage: "Any",
    detected: "detected: {language}",
    swap: "Exchange the languages",
    alternatives: "Alternatives",
    sourceText: "Text to translate",
    typeText: "Type or paste a text",
    typePair: "Second text, for a model of pairs",
    translate: "Translate",
    emptyTranslation: "The translation appears here.",
    otherTranslations: "Other translations",
    model: "Model",
    maxTokens: "New tokens",
    temperature: "Temperature",
    topP: "Top p",
    seed: "Seed",
    random: "random",
    automatic: "automatic",
    prompt: "Prompt",
    typePrompt: "The beginning of a text",
    generate: "Generate",
    emptyGenerated: "The continuation appears here, token by token.",
    tokenHelp: "Point at a token, or move to it with Tab, for its probability and its alternatives. The darker, the less probable.",
    probability: "Probability",
    mostProbable: "Most probable here",
    system: "System message",
    typeSystem: "You are a helpful assistant.",
    message: "Message",
    conversation: "Conversation",
    typeMessage: "Type a message",
    emptyChat: "Ask something.",
    noAnswer: "The model ended its answer without a word.",
    send: "Send",
    stop: "Stop",
    clear: "New conversation",
    text: "Text",
    secondText: "Second text (for models of pairs)",
    classify: "Classify",
    emptyClasses: "The probability of each class appears here.",
    maskedText: "Text with masks",
    typeMasked: "A <mask> barks.",
    candidates: "Candidates",
    insertMask: "Insert a mask",
    fill: "Fill",
    emptyMasks: "The most probable tokens for each mask appear here.",
    mask: "Mask {number}",
    result: "Result",
    copy: "Copy",
    copied: "Copied",
    ctrlEnter: "Ctrl + Enter",
    enterSends: "Enter sends, Shift + Enter is a new line",
    milliseconds: "{count} ms",
    tokens: "{count} tokens · {rate}/s",
    docs: "Routes of this server",
    models: "Models: {names} ·",
    noModels: "This server has no model for this page.",
    loading: "The server is loading its models. Waiting…",
    unreachable: "The server does not answer. Is it still running?",
    wrongKey: "The server refused this key.",
    failed: "The server answered {status}.",
  },
  zh: {
    title: "heedful",
    skip: "跳到正文",
    uses: "功能",
    switchLanguage: "English",
    themeAuto: "主题：自动",
    themeLight: "主题：浅色",
    themeDark: "主题：深色",
    keyLabel: "此服务器需要 API 密钥",
    keySave: "使用此密钥",
    tabTranslate: "翻译",
    tabGenerate: "续写",
    tabChat: "对话",
    tabClassify: "分类",
    tabFill: "填词",
    from: "源语言",
    to: "目标语言",
    detect: "自动检测",
    anyLanguage: "任意",
    detected: "检测到：{language}",
    swap: "交换语言",
    alternatives: "备选译文",
    sourceText: "待译文本",
    typeText: "输入或粘贴文本",
    typePair: "第二段文本（用于文本对模型）",
    translate: "翻译",
    emptyTranslation: "译文显示在这里。",
    otherTranslations: "其他译文",
    model: "模型",
    maxTokens: "新词元数",
    temperature: "温度",
    topP: "Top p",
    seed: "随机种子",
    random: "随机",
    automatic: "自动",
    prompt: "提示",
    typePrompt: "一段文本的开头",
    generate: "续写",
    emptyGenerated: "续写内容将逐个词元显示在这里。",
    tokenHelp: "将鼠标指向词元，或用 Tab 键移到词元上，可查看其概率和备选。颜色越深，概率越低。",
    probability: "概率",
    mostProbable: "此处概率最高的词元",
    system: "系统消息",
    typeSystem: "你是一个乐于助人的助手。",
    message: "消息",
    conversation: "对话",
    typeMessage: "输入消息",
    emptyChat: "请提问。",
    noAnswer: "模型没有回答任何内容。",
    send: "发送",
    stop: "停止",
    clear: "新对话",
    text: "文本",
    secondText: "第二段文本（用于文本对模型）",
    classify: "分类",
    emptyClasses: "各类别的概率显示在这里。",
    maskedText: "含掩码的文本",
    typeMasked: "A <mask> barks.",
    candidates: "候选数",
    insertMask: "插入掩码",
    fill: "填词",
    emptyMasks: "每个掩码处概率最高的词元显示在这里。",
    mask: "掩码 {number}",
    result: "结果",
    copy: "复制",
    copied: "已复制",
    ctrlEnter: "Ctrl + Enter",
    enterSends: "Enter 发送，Shift + Enter 换行",
    milliseconds: "{count} 毫秒",
    tokens: "{count} 词元 · {rate}/秒",
    docs: "此服务器的接口",
    models: "模型：{names} ·",
    noModels: "此服务器没有适用于本页的模型。",
    loading: "服务器正在加载模型，请稍候……",
    unreachable: "服务器没有响应。它还在运行吗？",
    wrongKey: "服务器拒绝了此密钥。",
    failed: "服务器返回 {status}。",
  },
};

let current = localStorage.getItem("language");
if (!(current in TEXTS)) {
  current = navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

/** The code of the language of the page. */
export function language() {
  return current;
}

/** A text of the page, with `{name}` replaced by values. */
export function text(name, values = {}) {
  return TEXTS[current][name].replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);
}

/** The name of a language in the language of the page. */
export function languageName(code, fallback = code) {
  try {
    const names = new Intl.DisplayNames([current], { type: "language", fallback: "none" });
    return names.of(code) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Exchange the language of the page. */
export function switchLanguage() {
  current = current === "en" ? "zh" : "en";
  localStorage.setItem("language", current);
}

/** Show all texts that the elements of the page name in their data. */
export function showTexts() {
  document.documentElement.lang = current === "zh" ? "zh-Hans" : "en";
  const attributes = [
    ["text", (element, value) => (element.textContent = value)],
    ["hint", (element, value) => (element.placeholder = value)],
    ["empty", (element, value) => (element.dataset.shown = value)],
    ["label", (element, value) => element.setAttribute("aria-label", value)],
    ["title", (element, value) => {
      element.title = value;
      element.setAttribute("aria-label", value);
    }],
  ];
  for (const [name, show] of attributes) {
    for (const element of document.querySelectorAll(`[data-${name}]`)) {
      show(element, text(element.dataset[name]));
    }
  }
  const button = document.getElementById("language");
  button.textContent = text("switchLanguage");
  button.lang = current === "zh" ? "en" : "zh-Hans";
}
